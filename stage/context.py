"""Context parallelism: how attention meets the keys of other ranks, when the sequence is sharded over cp.

`all_gather` gathers keys and values. `ring` passes them on from rank to rank (Liu et al. 2023, arXiv:2310.01889).
`ulysses` exchanges shards of the sequence for shards of the heads (Jacobs et al. 2023, arXiv:2309.14509). `ring:AxB`
is a ring of A such groups of B neighbours (Fang and Zhao 2024, arXiv:2405.07719).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stage.errors import StrategyError

__all__ = ["Context", "parse_context"]

Rows = tuple[tuple[str, tuple[str, ...]], ...]

FORMS = "all_gather, ring, ulysses, or ring:AxB with A x B = cp"
HEADS = ("cp_kv", "cp_rep")
"""The parts of cp that exchange heads: first those of different KV heads, then those that share one."""


@dataclass(frozen=True, slots=True)
class Context:
    """`name` as it was asked for, whether keys and values circulate, and whether heads are exchanged.

    `parts` are the degrees of ring and exchange, where they were given.
    """

    name: str
    circulates: bool = False
    exchanges: bool = False
    parts: tuple[int, int] | None = None

    def ulysses(self, cp: int) -> int:
        """How many neighbours along cp exchange heads; a StrategyError if the given degrees are not those of cp.

        >>> parse_context("ring:4x2").ulysses(8), parse_context("ring").ulysses(8), parse_context("ulysses").ulysses(8)
        (2, 1, 8)
        """
        if self.parts is None:
            return cp if self.exchanges else 1
        ring, inner = self.parts
        if ring * inner != cp:
            raise StrategyError(
                f"context = {self.name} is for cp = {ring * inner}, but cp = {cp}; "
                "set cp to that, or choose degrees that multiply to it"
            )
        return inner

    def table(self, rows: Rows, cp: int) -> Rows:
        """A strategy's rows, with one more for the heads of the attention core if heads are exchanged.

        >>> parse_context("ulysses").table((("heads", ("tp",)), ("seq", ("cp",))), 2)[0]
        ('core.heads', ('tp', 'cp_kv', 'cp_rep'))
        """
        if self.ulysses(cp) == 1:
            return rows
        names = [dim for dim, _ in rows]
        given = dict(rows)
        heads, seq = given.get("heads", ()), given.get("seq", ())
        first = "heads" in names and names.index("heads") < names.index("seq")
        kept = heads if first else tuple(axis for axis in heads if axis not in seq)
        at = names.index("heads" if first else "seq")
        return (*rows[:at], ("core.heads", (*kept, *HEADS)), *rows[at:])

    def check(self, strategy: str, seq: Sequence[str], attention: str) -> None:
        """A StrategyError where this can not be done: the sequence is not sharded over cp, or attention is in parts."""
        if not (self.circulates or self.exchanges):
            return
        if "cp" not in seq:
            raise StrategyError(
                f"strategy {strategy}: context = {self.name}, but the row seq of [shard] has no cp; add it there"
            )
        if self.circulates and attention != "fused":
            raise StrategyError(
                f"context = {self.name} merges the results of a fused attention kernel, but attention is {attention}; "
                "choose fused attention, or context all_gather or ulysses"
            )


def parse_context(text: str) -> Context:
    """What a text asks for; a StrategyError lists the known forms."""
    found = re.fullmatch(r"ring:([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if found:
        ring, inner = (int(part) for part in found.groups())
        return Context(text, ring > 1, inner > 1, (ring, inner))
    if text not in ("all_gather", "ring", "ulysses"):
        raise StrategyError(f"context is {text!r}; known: {FORMS}")
    return Context(text, text == "ring", text == "ulysses")
