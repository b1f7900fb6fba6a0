"""What of its peaks a device keeps up: shares, latencies and clocks that a data sheet does not say.

They belong to a system, not to a model or a job: every kernel on it is priced with the same ones. `docs/cost.md` says
what each means physically and how those of the shipped systems were measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stage.cost.reading import LARGEST, Reader, reading
from stage.errors import StageError

__all__ = ["Efficiency", "read_efficiency"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How close to its peaks a device comes; the values here are those of a system that says nothing.

    `matrix` is the share of a dtype's peak that long products of matrices keep up: the clock that the power limit
    leaves, over the boost clock. `boost` is the share of the peak at the boost clock that the loop of one unit reaches.
    `operand_bandwidth` is bytes a second by which all units together get operands from the last cache, where a copy
    that several of them receive counts for each; None stands for a quarter more than large tiles need at the peak.
    `memory` is the share of the bandwidth of memory that long streams reach, `reuse` that of what a kernel reads and
    writes which is found in an empty cache because the kernel before it used it. `kernel` is seconds from a kernel's
    start until its units are busy and from when they run dry to its end, `tile` those of each tile's first loads and
    last stores. `attention` is the share of the matrix peak that products within fused attention reach, `softmax` the
    clock cycles of a unit for the rest of a pair of query and key, forward and backward, `rows` the queries that
    a unit takes at once, and `block` the seconds of each such block before and after its products.

    >>> Efficiency().matrix_share("fp16")
    0.8
    """

    matrix: Mapping[str, float] = field(default_factory=dict)
    boost: float = 0.95
    operand_bandwidth: float | None = None
    memory: float = 0.85
    reuse: float = 0.25
    kernel: float = 2e-6
    tile: float = 0.5e-6
    attention: float = 0.85
    softmax: tuple[float, float] = (0.05, 0.18)
    rows: int = 128
    block: float = 3e-6

    def matrix_share(self, dtype: str) -> float:
        """The share of a dtype's peak that long products keep up; that of bf16 for a dtype that is not listed."""
        return self.matrix.get(dtype, self.matrix.get("bf16", 0.8))


def read_efficiency(file: Reader, dtypes: tuple[str, ...]) -> Efficiency:
    """Return what the table [efficiency] of a system says, and the values of a system without it for the rest."""
    if not file.has("efficiency"):
        return Efficiency()
    found: dict[str, Any] = {}
    with reading(file.table_of("efficiency")) as table:
        if table.has("matrix_share"):
            with reading(table.table_of("matrix_share")) as matrix:
                found["matrix"] = {key: share(matrix, key) for key in dtypes if matrix.has(key)}
        for key in ("boost", "memory", "reuse", "attention"):
            if table.has(f"{key}_share"):
                found[key] = share(table, f"{key}_share")
        for key in ("kernel", "tile", "block"):
            if table.has(f"{key}_us"):
                found[key] = 1e-6 * table.number(f"{key}_us")
        if table.has("attention_rows"):
            found["rows"] = table.integer("attention_rows")
        if table.has("operand_gb_s"):
            found["operand_bandwidth"] = 1e9 * table.number("operand_gb_s")
        if table.has("softmax_clocks"):
            found["softmax"] = forward_and_backward(table, "softmax_clocks")
    return Efficiency(**found)


def share(table: Reader, key: str) -> float:
    """Return a number above 0 and of at most 1."""
    value = table.number(key)
    if value > 1:
        raise table.wrong(key, "a share of at most 1")
    return value


def forward_and_backward(table: Reader, key: str) -> tuple[float, float]:
    """Return two numbers above 0."""
    given = table.value(key)
    if not isinstance(given, list) or len(given) != 2 or any(not is_positive(value) for value in given):
        raise StageError(
            f"{table.where} {key} is {given!r}; two numbers above 0, forward and backward, are expected"
        )
    return float(given[0]), float(given[1])


def is_positive(value: object) -> bool:
    """Whether a value of a file is a number above 0, and no larger than any real figure."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST
