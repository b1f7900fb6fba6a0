"""The mesh refines both views of the ranks into atoms, and numbers ranks and groups by formula."""

import contextlib
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.errors import MeshError
from stage.mesh import Mesh, build_mesh

DENSE = ("pp", "dp", "cp", "tp")
SPARSE = ("pp", "edp", "ep", "etp")


@pytest.mark.parametrize(
    ("degrees", "atoms"),
    [
        ({}, []),
        ({"tp": 8}, [("tp", 8)]),
        ({"pp": 2, "dp": 3, "cp": 5, "tp": 7}, [("pp", 2), ("dp", 3), ("cp", 5), ("tp", 7)]),
        ({"dp": 4, "tp": 2, "ep": 8}, [("dp", 4), ("tp", 2)]),
        ({"dp": 4, "tp": 2, "ep": 4}, [("edp", 2), ("dp_2", 2), ("tp", 2)]),
        ({"dp": 8, "ep": 4}, [("edp", 2), ("ep", 4)]),
        ({"dp": 8, "ep": 2, "etp": 2}, [("edp", 2), ("ep", 2), ("etp", 2)]),
        ({"dp": 2, "tp": 8, "ep": 2, "etp": 2}, [("dp", 2), ("tp_1", 2), ("ep", 2), ("etp", 2)]),
        ({"dp": 8, "dp_shard": 4}, [("dp_replicate", 2), ("dp_shard", 4)]),
        ({"dp": 8, "dp_shard": 1}, [("dp", 8)]),
        ({"dp": 16, "dp_shard": 8, "ep": 4}, [("dp_replicate", 2), ("dp_2", 2), ("ep", 4)]),
        ({"tp": 8, "kv_heads": 2}, [("tp_kv", 2), ("tp_rep", 4)]),
        ({"tp": 8, "tp_x": 2}, [("tp_y", 4), ("tp_x", 2)]),
        ({"tp": 8, "tp_x": 8}, [("tp", 8)]),
        ({"tp": 8, "tp_x": 4, "kv_heads": 2}, [("tp_y", 2), ("tp_x", 4)]),
        ({"tp": 8, "tp_x": 4, "kv_heads": 4}, [("tp_y", 2), ("tp_2", 2), ("tp_rep", 2)]),
        ({"tp": 8, "kv_heads": 1}, [("tp", 8)]),
        ({"tp": 8, "kv_heads": 32}, [("tp", 8)]),
        ({"dp": 2, "tp": 4, "kv_heads": 2, "ep": 8}, [("dp", 2), ("tp_kv", 2), ("tp_rep", 2)]),
        ({"dp": 2, "tp": 4, "kv_heads": 2, "etp": 2, "ep": 4}, [("dp", 2), ("tp_kv", 2), ("etp", 2)]),
        ({"cp": 4, "tp": 2, "kv_heads": 8, "ulysses": 4}, [("cp", 4), ("tp", 2)]),
        ({"cp": 4, "tp": 2, "kv_heads": 4, "ulysses": 4}, [("cp_rep", 2), ("cp_kv", 2), ("tp", 2)]),
        ({"cp": 4, "tp": 4, "kv_heads": 2, "ulysses": 4}, [("cp", 4), ("tp_kv", 2), ("tp_rep", 2)]),
        ({"cp": 8, "ulysses": 2}, [("cp_ring", 4), ("cp_ulysses", 2)]),
        (
            {"dp": 2, "cp": 8, "kv_heads": 2, "ulysses": 4, "ep": 8},
            [("dp", 2), ("cp_ring", 2), ("cp_rep", 2), ("cp_kv", 2)],
        ),
    ],
)
def test_atoms_refine_all_views(degrees: dict[str, int], atoms: list[tuple[str, int]]) -> None:
    assert list(build_mesh(**degrees).atoms) == atoms


def test_parts_of_cp_have_names_in_every_refinement() -> None:
    mesh = build_mesh(cp=8, tp=2, kv_heads=4, ulysses=4)
    names = {name: mesh.expand(name) for name in ("cp", "cp_ring", "cp_ulysses", "cp_kv", "cp_rep")}
    assert names == {
        "cp": ("cp_ring", "cp_rep", "cp_kv"),
        "cp_ring": ("cp_ring",),
        "cp_ulysses": ("cp_rep", "cp_kv"),
        "cp_kv": ("cp_kv",),
        "cp_rep": ("cp_rep",),
    }
    assert build_mesh(cp=8, ulysses=8).expand(["cp_ring", "cp_ulysses", "cp_rep"]) == ("cp",)
    assert "cp_ring" not in dict(build_mesh(cp=8).axes)


def test_axes_name_runs_of_atoms() -> None:
    mesh = build_mesh(pp=2, dp=8, dp_shard=4, cp=2, tp=4, kv_heads=2, ep=16, etp=2)
    assert dict(mesh.axes) == {
        "pp": ("pp",),
        "dp": ("edp", "dp_shard"),
        "cp": ("cp",),
        "tp": ("tp_kv", "etp"),
        "edp": ("edp",),
        "ep": ("dp_shard", "cp", "tp_kv"),
        "etp": ("etp",),
        "tp_y": ("tp_kv", "etp"),
        "tp_x": (),
        "tp_kv": ("tp_kv",),
        "tp_rep": ("etp",),
        "dp_replicate": ("edp",),
        "dp_shard": ("dp_shard",),
        "world": ("pp", "edp", "dp_shard", "cp", "tp_kv", "etp"),
    }


def test_an_axis_that_is_not_split_has_the_atoms_of_the_whole() -> None:
    mesh = build_mesh(dp=4, tp=2)
    assert mesh.expand("dp_shard") == mesh.expand("dp") == ("dp",)
    assert mesh.expand("tp_kv") == ("tp",)
    assert mesh.expand(["dp_replicate", "tp_rep", "pp", "cp", "etp"]) == ()
    assert mesh.expand("edp") == ("dp", "tp")


def valid_meshes() -> list[Mesh]:
    """Every mesh of some small degrees that fit one another."""
    names = ("pp", "dp", "cp", "tp", "ep", "etp", "dp_shard", "kv_heads")
    choices = ((1, 2), (1, 4, 6), (1, 2, 3), (1, 4), (1, 2, 3, 8), (1, 2), (None, 1, 2), (None, 2))
    found = []
    for degrees in itertools.product(*choices):
        with contextlib.suppress(MeshError):
            given = {name: degree for name, degree in zip(names, degrees, strict=True) if degree is not None}
            found.append(build_mesh(**given))
    return list(dict.fromkeys(found))


meshes = st.sampled_from(valid_meshes())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(mesh=meshes)
def test_both_views_cover_the_world(mesh: Mesh) -> None:
    for view in (DENSE, SPARSE):
        assert mesh.expand(view) == mesh.names == mesh.expand("world")
    for parts, whole in ((("dp_replicate", "dp_shard"), "dp"), (("tp_kv", "tp_rep"), "tp")):
        assert mesh.expand(parts) == mesh.expand(whole)
    assert math.prod(mesh.degree(axis) for axis in DENSE) == mesh.degree(SPARSE) == mesh.world
    for atom in mesh.names:
        assert atom in mesh.siblings(atom)
        assert mesh.parent(atom) in DENSE
        assert mesh.siblings(atom) == mesh.expand(mesh.parent(atom))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(mesh=meshes, data=st.data())
def test_groups_hold_the_ranks_that_differ_along_the_names_only(mesh: Mesh, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(mesh.names))
    names = shuffled[: data.draw(st.integers(0, len(shuffled)))]
    table = mesh.groups(names)
    assert table.shape == (mesh.world // mesh.degree(names), mesh.degree(names))
    assert sorted(table.ravel()) == list(range(mesh.world))
    assert (np.diff(table[:, 0]) > 0).all()
    assert (table.min(axis=1) == table[:, 0]).all()
    for row, ranks in enumerate(table):
        fixed = {
            tuple((a, i) for a, i in mesh.coordinates(r).items() if a not in names) for r in ranks.tolist()
        }
        assert len(fixed) == 1
        along = [tuple(mesh.coordinates(rank)[name] for name in names) for rank in ranks.tolist()]
        assert along == list(itertools.product(*(range(mesh.degree(name)) for name in names)))
        assert {mesh.group_index(names, rank) for rank in ranks.tolist()} == {row}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(mesh=meshes)
def test_a_rank_is_the_mixed_radix_number_of_its_coordinates(mesh: Mesh) -> None:
    for rank in range(0, mesh.world, 7):
        here = mesh.coordinates(rank)
        assert tuple(here) == mesh.names
        assert sum(here[atom] * mesh.stride(atom) for atom in mesh.names) == rank


def test_describe_speaks_of_axes() -> None:
    mesh = build_mesh(pp=2, dp=8, cp=2, tp=4, kv_heads=2, ep=16)
    assert mesh.describe(mesh.expand(["dp", "tp"])) == "dp x tp"
    assert mesh.describe(mesh.expand("ep")) == "ep"
    assert mesh.describe(mesh.expand(["tp", "dp"])) == "tp x dp"
    assert mesh.describe(["tp_rep", "tp_kv"]) == "tp_rep x tp_kv"
    assert mesh.describe(mesh.names) == "pp x dp x cp x tp"
    assert mesh.describe([]) == ""


def test_tables_are_shared_and_read_only() -> None:
    mesh = build_mesh(dp=4, tp=2)
    assert mesh.groups("tp") is build_mesh(dp=4, tp=2).groups(["tp"])
    with pytest.raises(ValueError, match="read-only"):
        mesh.groups("tp")[0, 0] = 1


def test_groups_of_many_ranks_are_fast() -> None:
    mesh = build_mesh(pp=16, dp=256, cp=4, tp=8, ep=64, dp_shard=32)
    assert mesh.world == 131072
    start = time.perf_counter()
    for names in (["tp"], ["dp"], ["ep"], ["dp_shard", "cp"], ["edp"]):
        assert mesh.groups(names).size == 131072
    assert time.perf_counter() - start < 1
    assert mesh.group_index("ep", 100_003) in np.where(mesh.groups("ep") == 100_003)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "dp = 0 is not a degree; give dp an integer of at least 1"),
        ({"tp": 2.0}, "tp = 2.0 is not a degree; give tp an integer of at least 1"),
        ({"kv_heads": -1}, "kv_heads = -1 is not a degree; give kv_heads an integer of at least 1"),
        (
            {"dp": 4, "ep": 3},
            "ep x etp = 3 does not divide dp x cp x tp = 4, the ranks that share the experts; "
            "choose an ep x etp that divides it",
        ),
        ({"tp": 6, "tp_x": 4}, "tp_x = 4 does not divide tp = 6; choose a tp_x that divides it"),
        ({"dp": 6, "dp_shard": 4}, "dp_shard = 4 does not divide dp = 6; choose a dp_shard that divides it"),
        (
            {"tp": 8, "kv_heads": 3},
            "kv_heads = 3 and tp = 8 do not divide one another; choose a tp that divides kv_heads, "
            "or is a multiple of it",
        ),
        (
            {"dp": 2, "cp": 3, "tp": 2, "ep": 4},
            "cp 3 x tp 2 = 6 ranks and ep 4 = 4 ranks do not divide one another, but both are blocks of "
            "consecutive ranks; choose degrees so that one is a multiple of the other",
        ),
        (
            {"cp": 4, "tp": 2, "kv_heads": 6, "ulysses": 2},
            "kv_heads = 6 and tp x ulysses = 4 do not divide one another; choose a tp x ulysses that divides "
            "kv_heads, or is a multiple of it",
        ),
        (
            {"cp": 6, "ulysses": 3, "ep": 2},
            "ulysses 3 = 3 ranks and ep 2 = 2 ranks do not divide one another, but both are blocks of "
            "consecutive ranks; choose degrees so that one is a multiple of the other",
        ),
        (
            {"dp": 12, "dp_shard": 6, "ep": 4},
            "dp_shard 6 = 6 ranks and ep 4 = 4 ranks do not divide one another, but both are blocks of "
            "consecutive ranks; choose degrees so that one is a multiple of the other",
        ),
    ],
)
def test_build_mesh_errors_say_what_where_and_what_to_do(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        build_mesh(**arguments)
    assert str(caught.value) == message


def test_unknown_and_repeated_names() -> None:
    mesh = build_mesh(dp=4, tp=2, ep=4)
    with pytest.raises(MeshError) as caught:
        mesh.degree("sp")
    assert str(caught.value) == (
        "axis 'sp' is not in the mesh; "
        "use one of pp dp cp tp edp ep etp tp_y tp_x tp_kv tp_rep dp_replicate dp_shard world dp_2"
    )
    with pytest.raises(MeshError) as caught:
        mesh.expand(["dp", "ep"])
    assert str(caught.value) == "'ep' repeats dp_2 in axes dp ep; name each part once"
    with pytest.raises(MeshError) as caught:
        mesh.coordinates(8)
    assert str(caught.value) == "rank 8 is not in a mesh of 8 ranks; use 0 to 7"


def test_atoms_are_unique_and_at_least_two() -> None:
    for atoms in ((("a", 2), ("a", 2)), (("a", 1),)):
        with pytest.raises(AssertionError):
            Mesh(atoms, ())


def test_an_axis_is_a_run_of_consecutive_atoms() -> None:
    atoms = (("a", 2), ("b", 2), ("c", 2))
    for axis in (("x", ("a", "c")), ("x", ("b", "a")), ("a", ("a", "b"))):
        with pytest.raises(AssertionError):
            Mesh(atoms, (axis,))


def test_index_is_the_place_in_a_row_of_the_groups() -> None:
    mesh = build_mesh(pp=2, dp=3, cp=2, tp=4, kv_heads=2)
    for names in (["tp", "dp"], ["tp_kv", "cp"], []):
        for row in mesh.groups(names).tolist():
            assert [mesh.index(names, mesh.coordinates(rank)) for rank in row] == list(range(len(row)))
