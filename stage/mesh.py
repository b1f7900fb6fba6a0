"""The mesh: how the ranks of a job form named axes.

The same ranks are seen in two ways, dense `pp dp cp tp` and sparse `pp edp ep etp`, and `dp`, `cp` and `tp` may
be split further. The mesh therefore keeps **atoms**, the common refinement of all views; an **axis** is a name
for some consecutive atoms. Layouts and collectives speak of atoms only, so two views never need reconciling.

Invariants:

* atoms are ordered outermost first, their names are unique and their degrees at least 2;
* an axis is a run of consecutive atoms; an axis with the name of an atom is exactly that atom;
* a rank is the mixed-radix number of its coordinates, the innermost atom varying fastest.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stage.degrees import check_chain, check_degrees, kv_replicas
from stage.errors import MeshError

__all__ = ["Mesh", "build_mesh"]

_DENSE = ("pp", "dp", "cp", "tp")

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks arranged by ordered atoms, with the named axes made of them.

    >>> mesh = build_mesh(dp=4, tp=2, ep=4)
    >>> mesh.atoms
    (('edp', 2), ('dp_2', 2), ('tp', 2))
    >>> mesh.expand(["ep"]), mesh.degree("ep"), mesh.world
    (('dp_2', 'tp'), 4, 8)
    """

    atoms: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.atoms]
        assert len(set(names)) == len(names), f"an atom appears twice: {self.atoms}"
        assert all(degree > 1 for _, degree in self.atoms), f"atoms of degree 1 do not exist: {self.atoms}"
        for axis, atoms in self.axes:
            start = names.index(atoms[0]) if atoms else 0
            assert [*atoms] == names[start : start + len(atoms)], f"axis {axis} is not consecutive: {atoms}"
            assert axis not in names or atoms == (axis,), f"axis {axis} is not the atom of that name: {atoms}"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(degree for _, degree in self.atoms)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the atoms, outermost first."""
        return tuple(name for name, _ in self.atoms)

    def degree(self, names: Iterable[str] | str) -> int:
        """The number of ranks along the named axes and atoms together; MeshError for an unknown name."""
        degrees = dict(self.atoms)
        return math.prod(degrees[atom] for atom in self.expand(names))

    def expand(self, names: Iterable[str] | str) -> tuple[str, ...]:
        """The atoms of the named axes and atoms, in the order given.

        >>> build_mesh(dp=4, tp=4, kv_heads=2).expand(["tp", "dp"])
        ('tp_kv', 'tp_rep', 'dp')

        Raises MeshError for an unknown name, and where two names share an atom.
        """
        return _expand(self, (names,) if isinstance(names, str) else tuple(names))

    def parent(self, atom: str) -> str:
        """The dense axis (pp dp cp tp) that the atom belongs to: `tp` for `tp_rep`."""
        return next(axis for axis, atoms in self.axes if axis in _DENSE and self.expand(atom)[0] in atoms)

    def siblings(self, atom: str) -> tuple[str, ...]:
        """The atoms of the dense axis that the atom belongs to, itself included."""
        return self.expand(self.parent(atom))

    def describe(self, atoms: Iterable[str]) -> str:
        """The atoms as text, regrouped to the axes a user knows.

        >>> build_mesh(dp=4, tp=4, kv_heads=2).describe(["dp", "tp_kv", "tp_rep"])
        'dp x tp'
        """
        rest, words = self.expand(atoms), []
        while rest:
            runs = ((axis, run) for axis, run in self.axes if axis != "world" and run)
            name, run = next(((a, r) for a, r in runs if rest[: len(r)] == r), (rest[0], rest[:1]))
            words.append(name)
            rest = rest[len(run) :]
        return " x ".join(words)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` along each atom, outermost first.

        >>> build_mesh(dp=3, tp=2).coordinates(5)
        {'dp': 2, 'tp': 1}
        """
        if not 0 <= rank < self.world:
            raise MeshError(f"rank {rank} is not in a mesh of {self.world} ranks; use 0 to {self.world - 1}")
        result = {}
        for name, degree in reversed(self.atoms):
            rank, result[name] = divmod(rank, degree)
        return dict(reversed(result.items()))

    def index(self, names: Iterable[str] | str, coordinates: Mapping[str, int]) -> int:
        """The number of a place along the named axes and atoms, the last one varying fastest."""
        index, degrees = 0, dict(self.atoms)
        for atom in self.expand(names):
            index = index * degrees[atom] + coordinates[atom]
        return index

    def stride(self, atom: str) -> int:
        """The distance in rank of neighbours along the atom.

        >>> build_mesh(pp=2, dp=3, tp=4).stride("dp")
        4
        """
        index = self.names.index(self.expand(atom)[-1])
        return math.prod(degree for _, degree in self.atoms[index + 1 :])

    def groups(self, names: Iterable[str] | str) -> Ranks:
        """All groups of ranks that differ only along `names`, shape (groups, ranks of a group), read-only.

        A row lists its ranks with the last name varying fastest, the order in which a flattened collective
        numbers them; rows are ordered by first member.

        >>> build_mesh(dp=2, tp=2).groups(["dp"]).tolist()
        [[0, 2], [1, 3]]
        """
        return _groups(self, self.expand(names))

    def group_index(self, names: Iterable[str] | str, rank: int) -> int:
        """The row of `groups(names)` that holds `rank`, without building the table."""
        used = self.expand(names)
        return self.index((atom for atom in self.names if atom not in used), self.coordinates(rank))


@lru_cache(maxsize=4096)
def _expand(mesh: Mesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """Atoms of axis and atom names, in the order given."""
    axes, degrees = dict(mesh.axes), dict(mesh.atoms)
    result: list[str] = []
    for name in names:
        if name in degrees:
            found: tuple[str, ...] = (name,)
        elif name in axes:
            found = axes[name]
        else:
            known = " ".join(dict.fromkeys([*axes, *degrees]))
            raise MeshError(f"axis {name!r} is not in the mesh; use one of {known}")
        for atom in found:
            if atom in result:
                raise MeshError(f"{name!r} repeats {atom} in axes {' '.join(names)}; name each part once")
            result.append(atom)
    return tuple(result)


@lru_cache(maxsize=64)
def _groups(mesh: Mesh, atoms: tuple[str, ...]) -> Ranks:
    """Ranks of every group over `atoms`, as the sum of a column of first members and a row of offsets."""
    others = tuple(name for name, _ in mesh.atoms if name not in atoms)
    table = _offsets(mesh, others)[:, None] + _offsets(mesh, atoms)[None, :]
    table.flags.writeable = False
    return table


def _offsets(mesh: Mesh, atoms: tuple[str, ...]) -> Ranks:
    """Rank offsets of all coordinates along `atoms`, the last one varying fastest."""
    result, degrees = np.zeros(1, dtype=np.int64), dict(mesh.atoms)
    for atom in atoms:
        step = np.arange(degrees[atom], dtype=np.int64) * mesh.stride(atom)
        result = (result[:, None] + step[None, :]).ravel()
    return result


def build_mesh(
    *,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    dp_shard: int | None = None,
    kv_heads: int | None = None,
    ulysses: int = 1,
    tp_x: int = 1,
) -> Mesh:
    """The mesh of pp x dp x cp x tp ranks, refined so that every view is made of whole atoms.

    `ep` and `etp` carve the sparse view out of dp x cp x tp; `dp_shard` splits dp into dp_replicate x dp_shard;
    `kv_heads` below tp splits tp into tp_kv x tp_rep, and `tp_x` into tp_y x tp_x. `ulysses` neighbours that exchange
    heads split cp into cp_ring x cp_ulysses, and that into cp_rep x cp_kv where they are more than the KV heads.

    >>> build_mesh(pp=2, dp=2, tp=4, kv_heads=2).atoms
    (('pp', 2), ('dp', 2), ('tp_kv', 2), ('tp_rep', 2))

    Raises MeshError for degrees that do not fit one another.
    """
    given = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep, "etp": etp}
    check_degrees(**given, dp_shard=dp_shard, kv_heads=kv_heads, tp_x=tp_x)
    inner, shard = dp * cp * tp, dp if dp_shard is None else dp_shard
    if inner % (ep * etp):
        raise MeshError(
            f"ep x etp = {ep * etp} does not divide dp x cp x tp = {inner}, the ranks that share the experts;"
            " choose an ep x etp that divides it"
        )
    for name, part, axis in (("dp_shard", shard, "dp"), ("tp_x", tp_x, "tp")):
        if given[axis] % part:
            raise MeshError(
                f"{name} = {part} does not divide {axis} = {given[axis]}; choose a {name} that divides it"
            )
    rep = kv_replicas("tp", tp, kv_heads)
    own = ulysses * rep // kv_replicas("tp x ulysses", tp * ulysses, kv_heads)
    dense, sparse = (("dp", dp), ("cp", cp), ("tp", tp)), (("ep", ep), ("etp", etp))
    hybrid = (("dp_shard", shard), *dense[1:])
    heads = (("ulysses", ulysses), dense[2]), (("ulysses kv", own), dense[2]), (("tp_rep", rep),)
    check_chain(dense, dense[1:], dense[2:], hybrid, sparse, sparse[1:], *heads, (("tp_x", tp_x),))
    views = {
        "pp": (pp * inner, inner),
        **_suffix_products(dp=dp, cp=cp, tp=tp),
        **_suffix_products(edp=inner // (ep * etp), ep=ep, etp=etp),
        **_suffix_products(tp_y=tp // tp_x, tp_x=tp_x),
        **_suffix_products(tp_kv=tp // rep, tp_rep=rep),
        "dp_replicate": (inner, shard * cp * tp),
        "dp_shard": (shard * cp * tp, cp * tp),
        "world": (pp * inner, 1),
    }
    parts = {"cp_ring": cp // ulysses, "cp_ulysses": ulysses}, {"cp_rep": ulysses // own, "cp_kv": own}
    return _refine(
        views | {k: v for part in parts if ulysses > 1 for k, v in _suffix_products(**part, tp=tp).items()}
    )


def _suffix_products(**degrees: int) -> dict[str, tuple[int, int]]:
    """The (outer cut, inner cut) of each axis of a view that ends with the innermost rank."""
    cuts = [math.prod(list(degrees.values())[index:]) for index in range(len(degrees) + 1)]
    return dict(zip(degrees, pairwise(cuts), strict=True))


def _refine(spans: dict[str, tuple[int, int]]) -> Mesh:
    """The mesh whose axes are `spans` of suffix products (outer cut, inner cut)."""
    cuts = sorted({cut for span in spans.values() for cut in span}, reverse=True)
    pieces = list(pairwise(cuts))
    names = _atom_names(pieces, spans)
    atoms = tuple((name, outer // inner) for name, (outer, inner) in zip(names, pieces, strict=True))
    axes = {
        axis: tuple(name for name, (outer, inner) in zip(names, pieces, strict=True) if high >= outer > low)
        for axis, (high, low) in spans.items()
    }
    return Mesh(atoms, tuple(axes.items()))


def _atom_names(pieces: list[tuple[int, int]], spans: dict[str, tuple[int, int]]) -> list[str]:
    """A name for each atom: that of the first axis it equals (dense, sparse, split), else parent, number."""
    whole = {span: axis for axis, span in reversed(spans.items()) if axis != "world"}
    counts: dict[str, int] = {}
    names = []
    for outer, inner in pieces:
        parent = next(a for a in _DENSE if spans[a][0] >= outer > spans[a][1])
        counts[parent] = counts.get(parent, 0) + 1
        names.append(whole.get((outer, inner), f"{parent}_{counts[parent]}"))
    return names
