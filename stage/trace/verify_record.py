"""What is kept of a rank once its file is read: compact arrays, shared between ranks that are alike."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stage.trace.verify_node import COLL, SEND
from stage.trace.verify_order import Structure

__all__ = [
    "CHANNEL",
    "GROUP",
    "KIND",
    "PARTNER",
    "PEER",
    "ROWS",
    "SIZE",
    "SPLITS",
    "TAG",
    "TYPE",
    "Columns",
    "RankRecord",
]

Columns = npt.NDArray[np.int64]
"""Communication nodes, one column each; the rows are those below."""

KIND, TYPE, SIZE, GROUP, PEER, TAG, PARTNER, CHANNEL, SPLITS = range(9)
"""`SPLITS` is the number of those of an uneven all-to-all, from 1 on, in the list of the reader that read the rank.

`PEER` is the rank that a message names. Its other end is in the record of `PARTNER`, which has the same `CHANNEL`.

These are the peer and 0 where every rank has a record (`verify_partners` says what they are where it does not).
"""
ROWS: Final = 9


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What is kept of a rank: its dependency structure and the columns of its communication, in file order.

    `comparable` says that all its communication was understood, `runnable` that its nodes can run in the
    order of the file.
    """

    rank: int
    structure: Structure
    columns: Columns
    comparable: bool
    runnable: bool

    def ident(self, at: int) -> int:
        """Return the id of the node at a position."""
        return int(self.structure.ids[at])

    def groups(self) -> list[int]:
        """Return the groups on which the rank has collectives."""
        found: list[int] = np.unique(self.columns[GROUP][self.columns[KIND] == COLL]).tolist()
        return found

    def in_order(self) -> tuple[Columns, npt.NDArray[np.int64]]:
        """Return columns and positions of the communication nodes in the order they are meant to run."""
        at = np.flatnonzero(np.frombuffer(self.structure.kinds, np.uint8) >= SEND)
        order = self.structure.order()
        if order is None:
            return self.columns, at
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        chosen = np.argsort(place[at])
        return self.columns[:, chosen], at[chosen]
