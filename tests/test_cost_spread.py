"""Where members are: against sets of nodes counted one by one, for drawn meshes and placements."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stage.synthesis
from stage.cost.spread import group_members, group_spread, job_spread, members_spread, unit_sizes
from stage.cost.system import System
from stage.cost.system_file import load_system
from stage.errors import StageError
from stage.mesh import Mesh, build_mesh
from stage.request import resolve_request
from stage.trace.groups import PIPELINE_ENDS, GroupTable
from stage.trace.peer import Peer

H100 = load_system("h100")
ALL_MESHES = st.builds(
    build_mesh,
    pp=st.sampled_from([1, 2, 3, 4]),
    dp=st.sampled_from([1, 2, 3, 8]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4, 8]),
)
MESHES = ALL_MESHES.filter(lambda mesh: mesh.world > 1)


def groups_one_by_one(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[list[int]]:
    """Positions with equal group numbers, which another module gives."""
    numbers = GroupTable(mesh, [axes]).numbers(axes, np.arange(mesh.world))
    for number in np.unique(numbers):
        yield np.flatnonzero(numbers == number).tolist()


def farthest(system: System, groups: list[list[int]], world: int) -> tuple[int, ...]:
    """The most units of each tier that a group is in; how they divide its members evenly."""
    sizes = unit_sizes(system, world)
    units = [max(len({rank // size for rank in group}) for group in groups) for size in sizes]
    count, even = len(groups[0]), [1]
    for occupied in (*units[-2::-1], count):
        even.append(min(n for n in range(occupied, count + 1) if n % even[-1] == 0 and count % n == 0))
    return tuple(inner // outer for outer, inner in pairwise(even))[::-1]


@given(mesh=MESHES, data=st.data(), mapped=st.booleans())
def test_spread_is_that_of_the_farthest_group(mesh: Mesh, data: st.DataObject, mapped: bool) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.names), min_size=1, unique=True)))
    placement = np.array(data.draw(st.permutations(range(mesh.world)))) if mapped else None
    groups = list(groups_one_by_one(mesh, axes))
    if placement is not None:
        groups = [placement[group].tolist() for group in groups]
    found = group_spread(H100, mesh, axes, placement=placement)
    assert found == farthest(H100, groups, mesh.world)
    assert prod(found) == mesh.degree(axes)


@given(mesh=MESHES, data=st.data())
def test_members_are_those_of_the_groups(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.names), min_size=1, unique=True)))
    position = data.draw(st.integers(0, mesh.world - 1))
    (own,) = group_members(mesh, axes, np.array([position]))
    assert sorted(own.tolist()) == next(g for g in groups_one_by_one(mesh, axes) if position in g)


def test_axes_on_nodes_of_eight() -> None:
    """tp fills half a node, dp has two neighbours in each of eight, pp one in each of four nodes 64 ranks apart."""
    mesh = build_mesh(pp=4, dp=16, tp=4)
    assert group_spread(H100, mesh, ("tp",)) == (4, 1, 1)
    assert group_spread(H100, mesh, ("dp",)) == (2, 8, 1)
    assert group_spread(H100, mesh, ("pp",)) == (1, 4, 1)
    assert group_spread(H100, mesh, ("dp", "tp")) == (8, 8, 1)
    assert group_spread(H100, mesh, PIPELINE_ENDS) == (1, 2, 1)


def test_axes_beyond_a_rail() -> None:
    """64 nodes are two rails of 32."""
    assert group_spread(H100, build_mesh(dp=64, tp=8), ("dp",)) == (1, 32, 2)


def test_peers_are_as_far_as_the_farthest_pair() -> None:
    """Neighbours in a ring of 16 on nodes of 8: most are in one node, but the ring waits for those that are not."""
    mesh = build_mesh(pp=2, cp=16)
    assert group_spread(H100, mesh, Peer(("cp",), 1)) == (1, 2, 1)
    assert group_spread(H100, mesh, Peer(("cp",), 1), np.array([0, 1])) == (2, 1, 1)
    assert group_spread(H100, mesh, Peer(("pp",), 1)) == (1, 2, 1)


def test_uneven_members_count_as_even() -> None:
    """Three on two nodes count as one on each of three; 12 ranks fill nodes of 6."""
    assert members_spread(H100, [[6, 7, 8]], 16) == (1, 3, 1)
    assert unit_sizes(H100, 12) == (6, 12, 12)
    assert members_spread(H100, [list(range(12))], 12) == (6, 2, 1)


def test_spread_of_a_job_is_of_the_ranks_of_a_class() -> None:
    """Two stages on one node: the pipeline's messages stay within it, wherever ranks are put they do not."""
    sizes = {"layers": 2, "d_model": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_ff": 48, "vocab": 64}
    request = resolve_request("llama3-8b", sizes=sizes, batch=8, seq=32, pp=2, dp=8)
    job = stage.synthesis.job(request)
    spread = job_spread(H100, job)
    assert [spread(Peer(("pp",), 1), number) for number in (0, 1)] == [(1, 2, 1)] * 2
    assert spread(("dp",), 0) == (8, 1, 1)
    mixed = replace(job, placement=np.arange(16).reshape(8, 2).T.ravel())
    assert job_spread(H100, mixed)(Peer(("pp",), 1), 0) == (2, 1, 1)
    assert job_spread(H100, mixed)(("dp",), 0) == (4, 2, 1)


def test_rank_outside_is_an_error() -> None:
    with pytest.raises(StageError) as err:
        members_spread(H100, [[0, 4]], 4)
    assert str(err.value) == "a group has rank 4, but ranks are 0 to 3: correct the groups"


def test_system_too_small_is_an_error() -> None:
    closed = replace(H100, tiers=H100.tiers[:1])
    with pytest.raises(StageError) as err:
        unit_sizes(closed, 64)
    assert str(err.value) == "system h100 connects 8 of 64 ranks: add a [[network]] tier"
