"""The parts of a trace set: the names of its files, and its JSON as text that depends on the content alone."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["GROUPS", "JOURNAL", "MANIFEST", "TRACE_NAME", "groups_text", "is_part", "json_text", "trace_name"]

GROUPS = "groups.json"
MANIFEST = "manifest.json"
JOURNAL = "unfinished.journal"
TRACE_NAME = re.compile(r"(?P<prefix>.+)\.(?P<rank>0|[1-9][0-9]*)\.et", re.DOTALL)


def trace_name(prefix: str, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"{prefix}.{rank}.et"


def is_part(name: str) -> bool:
    """Return whether a file of this name can be part of a set, finished or not.

    >>> is_part("trace.12.et"), is_part("notes.txt")
    (True, False)
    """
    return name in (GROUPS, MANIFEST, JOURNAL) or TRACE_NAME.fullmatch(name) is not None


def json_text(content: Mapping[str, Any]) -> str:
    """Return an object as JSON text that depends on nothing but its content."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def groups_text(groups: Mapping[str, Sequence[int]]) -> str:
    """Return groups as JSON text, one a line, by number; members keep their ring order.

    >>> print(groups_text({"2": [2, 3], "1": (0, 1)}), end="")
    {
    "1": [0, 1],
    "2": [2, 3]
    }
    """
    names = sorted(groups, key=lambda name: (len(name), name))
    lines = (f"{json.dumps(name)}: {json.dumps([int(rank) for rank in groups[name]])}" for name in names)
    return "{\n" + ",\n".join(lines) + "\n}\n" if groups else "{}\n"
