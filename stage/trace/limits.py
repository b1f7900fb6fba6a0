"""Limits of single consumers that a job can exceed although nothing about it is wrong."""

from typing import Final

__all__ = ["GROUP_OVERFLOW", "ONE_AT_A_TIME", "TAG_LIMIT", "exceeded", "needed"]

GROUP_OVERFLOW: Final = 2148
"""ASTRA-sim multiplies a group's number by a million in an int of 32 bits."""

TAG_LIMIT: Final = 500_000_000
"""Tags from here on are those of ASTRA-sim's own collectives."""

ONE_AT_A_TIME: Final = (
    "communication is on several streams: ASTRA-sim runs one at a time, lowest free id first, so ranks of "
    "unequal speed may start them in different orders and block each other"
)
"""What a set with several communication streams risks."""

DESCRIPTORS: Final = 1024
"""Files that a process may have open by default; ASTRA-sim opens one a rank."""


def exceeded(world: int, groups: int, tag: int) -> list[tuple[str, str]]:
    """The limits that a job exceeds, each as a rule and a text; `groups` and `tag` are the highest numbers in use.

    >>> exceeded(64, 40, 255)
    []
    >>> exceeded(4096, 2560, 255)[0]
    ('group-number', 'group numbers up to 2560, but ASTRA-sim overflows from 2148 on')
    """
    found = []
    if world < 2:
        found.append(("one-rank", "the job has one rank, but ASTRA-sim needs two or more"))
    if groups >= GROUP_OVERFLOW:
        text = f"group numbers up to {groups}, but ASTRA-sim overflows from {GROUP_OVERFLOW} on"
        found.append(("group-number", text))
    if tag >= TAG_LIMIT:
        found.append(("comm-tag", f"tags up to {tag}, but consumers take tags below {TAG_LIMIT}"))
    return found


def needed(world: int) -> list[tuple[str, str]]:
    """What the machine of a consumer must allow, each as a rule and a text."""
    if world <= DESCRIPTORS:
        return []
    text = f"ASTRA-sim keeps a file open for each of {world} ranks: raise `ulimit -n` beyond that"
    return [("descriptors", text)]
