"""Rules that one node keeps or breaks alone, whatever the rank and the other nodes.

The table of attributes says which member of the oneof each one stands in: the one spelling that is safe with
every consumer, since some read one fixed member and take any other for a zero.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from stage.trace.limits import TAG_LIMIT
from stage.trace.node import CommType, NodeType, TraceNode
from stage.trace.report import short

__all__ = ["ATTRIBUTES", "COLL", "COMP", "MEM", "RECV", "SEND", "Facts", "Problem", "examine"]

COMP, MEM, SEND, RECV, COLL = range(5)
"""What a node takes of its rank: the compute slot, the communication slot (MEM, SEND, COLL), none (RECV)."""

Problem = tuple[str, str]
"""A rule and what is wrong."""

REQUIRED, OPTIONAL = True, False
GROUP_LIMIT: Final = 1 << 31

COMPUTE: Final = {
    "num_ops": ("int64_val", REQUIRED),
    "tensor_size": ("uint64_val", REQUIRED),
    "inputs": ("string_list", OPTIONAL),
    "outputs": ("string_list", OPTIONAL),
}
MEMORY: Final = {"tensor_size": ("uint64_val", REQUIRED)}
COLLECTIVE: Final = {
    "comm_type": ("int64_val", REQUIRED),
    "comm_size": ("int64_val", REQUIRED),
    "pg_name": ("string_val", OPTIONAL),
    "comm_priority": ("int32_val", OPTIONAL),
    "in_splits": ("int64_list", OPTIONAL),
    "out_splits": ("int64_list", OPTIONAL),
}
MESSAGE: Final = {"comm_size": ("int64_val", REQUIRED), "comm_tag": ("int32_val", REQUIRED)}
END: Final = {True: ("int32_val", REQUIRED), False: ("int32_val", OPTIONAL)}

ATTRIBUTES: Final[Mapping[int, Mapping[str, tuple[str, bool]]]] = {
    kind: {"is_cpu_op": ("bool_val", REQUIRED), **table}
    for kind, table in {
        NodeType.INVALID: {},
        NodeType.METADATA: {},
        NodeType.MEM_LOAD: MEMORY,
        NodeType.MEM_STORE: MEMORY,
        NodeType.COMP: COMPUTE,
        NodeType.COMM_SEND: {**MESSAGE, "comm_dst": END[True], "comm_src": END[False]},
        NodeType.COMM_RECV: {**MESSAGE, "comm_src": END[True], "comm_dst": END[False]},
        NodeType.COMM_COLL: COLLECTIVE,
    }.items()
}

USUAL: Final = frozenset(kind for kind in NodeType if kind >= NodeType.COMP)

KINDS: Final[Mapping[int, int]] = {
    NodeType.COMM_SEND: SEND,
    NodeType.COMM_RECV: RECV,
    NodeType.COMM_COLL: COLL,
    NodeType.MEM_LOAD: MEM,
    NodeType.MEM_STORE: MEM,
}

POSITIVE: Final = {
    "num_ops": ("num-ops", "takes no time or NaN in roofline mode"),
    "tensor_size": ("tensor-size", "stalls everything behind the node in roofline mode"),
    "comm_size": ("comm-size", "is never completed"),
}

SIMULATED: Final = (CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.ALL_TO_ALL, CommType.REDUCE_SCATTER)


class Splits(NamedTuple):
    """Bytes that a rank sends to and receives from each member of a group, in its order."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


class Facts(NamedTuple):
    """What the checks beyond one node need to know of it.

    `deps` are its parents without itself and without repeats, `ctrl_only` those that stand in no data_deps.
    Of communication: `peer` is the other rank, `own` this one as the node has it (-1: it does not say).
    `group` is the number of the process group, 0 for all ranks. `usable` is False if one of them is missing.
    `stream` is what the node says of its stream, "" if nothing. `splits` are those of an uneven all-to-all.
    """

    id: int
    kind: int
    deps: tuple[int, ...]
    problems: tuple[Problem, ...] = ()
    ctrl_only: tuple[int, ...] = ()
    usable: bool = True
    comm_type: int = 0
    size: int = 0
    group: int = 0
    peer: int = 0
    own: int = -1
    tag: int = 0
    stream: str = ""
    splits: Splits | None = None


def examine(node: TraceNode) -> Facts:
    """Return the facts of a node with everything wrong with it alone."""
    kind = KINDS.get(node.type, COMP)
    deps = node.data_deps
    ctrl_only: tuple[int, ...] = ()
    problems: list[Problem] = []
    if node.ctrl_deps or node.id in deps or (len(deps) > 1 and len(set(deps)) < len(deps)):
        problems += dependency_problems(node)
        together = dict.fromkeys((*deps, *node.ctrl_deps))
        together.pop(node.id, None)
        ctrl_only = tuple(dep for dep in set(node.ctrl_deps).difference(deps) if dep != node.id)
        deps = tuple(together)
    if node.type not in USUAL:
        problems += type_problems(node)
        problems += attribute_problems(node)
    elif not spelled_right(node):
        problems += attribute_problems(node)
    if kind < SEND:
        return Facts(node.id, kind, deps, tuple(problems), ctrl_only)
    return communication(node, kind, deps, problems, ctrl_only)


def spelled_right(node: TraceNode) -> bool:
    """Return whether nothing is wrong with the attributes of a node: nearly always so, and told fast."""
    attrs = node.attrs
    for name, (member, required) in ATTRIBUTES[node.type].items():
        found = attrs.get(name)
        if found is None:
            if required:
                return False
        elif found.member != member or (name in POSITIVE and found.value <= 0):  # type: ignore[operator]
            return False
    return not attrs["is_cpu_op"].value and not node.repeated


def dependency_problems(node: TraceNode) -> Iterator[Problem]:
    """Yield what is wrong with the dependencies of a node by themselves."""
    for field, deps in (("data_deps", node.data_deps), ("ctrl_deps", node.ctrl_deps)):
        if node.id in deps:
            yield "dep-self", f"{short(node.name)} has itself in {field} and can never start: remove it"
        if len(set(deps)) < len(deps):
            twice = next(dep for dep, count in Counter(deps).items() if count > 1)
            yield (
                "dep-repeated",
                f"{short(node.name)} has node {twice} in {field} more than once: list it once",
            )


def type_problems(node: TraceNode) -> Iterator[Problem]:
    """Yield what is wrong with the type of a node."""
    known = node.type in ATTRIBUTES
    name = NodeType(node.type).name if known else f"of type {node.type}"
    why = "breaks the final statistics of the simulator" if known else "is not in the schema"
    yield (
        "node-type",
        f"{short(node.name)} is {name}, which {why}: use COMP, COMM_SEND, COMM_RECV or COMM_COLL",
    )


def attribute_problems(node: TraceNode) -> Iterator[Problem]:
    """Yield what is wrong with the attributes of a node that the table knows."""
    attrs = node.attrs
    for name, (member, required) in ATTRIBUTES.get(node.type, ATTRIBUTES[NodeType.INVALID]).items():
        found = attrs.get(name)
        if found is None:
            if required:
                yield "attr-missing", f"{short(node.name)} has no {name}: write it as {member}"
        elif found.member != member:
            yield (
                "attr-member",
                f"{short(node.name)} has {name} as {found.member or 'nothing'}: write {member}",
            )
        elif name in POSITIVE and isinstance(found.value, int) and found.value <= 0:
            rule, effect = POSITIVE[name]
            yield rule, f"{short(node.name)} has {name} {found.value}, which {effect}: write a number above 0"
    if node.repeated:
        names = ", ".join(sorted(node.repeated))
        yield (
            "attr-repeated",
            f"{short(node.name)} has more than one {short(names)}: consumers differ in which",
        )
    if node.get("is_cpu_op") is True:
        yield (
            "cpu-op",
            f"{short(node.name)} has is_cpu_op true, which the simulator does not finish: write false",
        )


def communication(
    node: TraceNode, kind: int, deps: tuple[int, ...], problems: list[Problem], ctrl_only: tuple[int, ...]
) -> Facts:
    """Return the facts of a communication node."""
    size, stream = whole(node, "comm_size"), str(node.get("stream", ""))
    if kind == COLL:
        comm_type, group = whole(node, "comm_type"), group_number(node)
        problems += collective_problems(node, comm_type, group)
        splits = read_splits(node)
        problems += split_problems(node, comm_type, splits)
        usable = None not in (size, comm_type, group)
        known = comm_type or 0, size or 0, group or 0
        return Facts(
            node.id, kind, deps, tuple(problems), ctrl_only, usable, *known, stream=stream, splits=splits
        )
    named = whole(node, "comm_dst"), whole(node, "comm_src")
    peer, own = named if kind == SEND else named[::-1]
    tag = whole(node, "comm_tag")
    if tag is not None and not 0 <= tag < TAG_LIMIT:
        problems.append(("comm-tag", f"{short(node.name)} has comm_tag {tag}: use 0 to {TAG_LIMIT - 1}"))
    usable = None not in (size, peer, tag)
    own = -1 if own is None else own
    ends = peer or 0, own, tag or 0
    return Facts(node.id, kind, deps, tuple(problems), ctrl_only, usable, 0, size or 0, 0, *ends, stream)


def whole(node: TraceNode, name: str) -> int | None:
    """Return the value of an attribute if it is an integer, whatever member it stands in, of 63 bits."""
    value = node.get(name)
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else None


def group_number(node: TraceNode) -> int | None:
    """Return the number of the process group, 0 for all ranks, or None if its name is no number."""
    name = node.get("pg_name")
    if name is None or name in ("", "0"):
        return 0
    if (
        not isinstance(name, str)
        or not (name.isascii() and name.isdecimal())
        or name[0] == "0"
        or len(name) > 10
    ):
        return None
    return int(name) if int(name) < GROUP_LIMIT else None


def collective_problems(node: TraceNode, comm_type: int | None, group: int | None) -> Iterator[Problem]:
    """Yield what is wrong with the type and the group of a collective."""
    if comm_type is not None and comm_type not in SIMULATED:
        known = comm_type in set(CommType)
        kind = CommType(comm_type).name if known else f"comm_type {comm_type}"
        effect = "stops at it" if comm_type != CommType.BROADCAST else "replays it from duration_micros alone"
        use = ", ".join(kind.name for kind in SIMULATED)
        yield "comm-type", f"{short(node.name)} is {kind}: ASTRA-sim {effect}; use {use}"
    if group is None:
        found = short(node.get("pg_name"))
        yield "group-name", f"{short(node.name)} has pg_name {found}: write a decimal number of 1 or more"


def read_splits(node: TraceNode) -> Splits | None:
    """Return the splits of a collective, or None where it has none that are lists of as many numbers of 0 and more."""
    found = [node.get(name) for name in ("in_splits", "out_splits")]
    lists = [value if isinstance(value, tuple) else () for value in found]
    sent, received = (tuple(n for n in value if isinstance(n, int) and n >= 0) for value in lists)
    whole = len(sent) == len(lists[0]) == len(received) == len(lists[1])
    return Splits(sent, received) if sent and whole else None


def split_problems(node: TraceNode, comm_type: int | None, splits: Splits | None) -> Iterator[Problem]:
    """Yield what is wrong with the splits of a collective by themselves."""
    if "in_splits" not in node.attrs and "out_splits" not in node.attrs:
        return
    if comm_type is not None and comm_type != CommType.ALL_TO_ALL:
        yield "splits", f"{short(node.name)} has splits, but is no ALL_TO_ALL: leave them out"
    elif splits is None:
        text = "write both as one number of bytes, 0 or more, for each member"
        yield "splits", f"{short(node.name)} has in_splits and out_splits that do not fit: {text}"
