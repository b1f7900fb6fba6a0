"""Pairwise exchange: an all-to-all as messages, each member with one other at a time.

In step k of n - 1 a member sends to the one k places further in the group and receives from the one k places before it
(Thakur et al. 2005, Optimization of Collective Communication Operations in MPICH, section 3.3). What a member has for
itself stays where it is, and where nothing is to be sent there is no message.
"""

from collections.abc import Sequence
from dataclasses import replace

from stage.trace.exchange import Exchange
from stage.trace.peer import Peer
from stage.trace.template import Ref, TemplateNode

__all__ = ["pairwise_nodes", "results_of"]


def pairwise_nodes(collective: TemplateNode, exchange: Exchange) -> list[TemplateNode]:
    """The messages of one device in place of a collective, in the order of their steps; `exchange` is in bytes.

    Sends wait for what the collective waits for. Receives wait for nothing but those before them.
    """
    found, n, channel = [], len(exchange.sent), f"recv {' '.join(collective.axes)}"
    for k in range(1, n):
        for kind, offset, sizes in (("send", k, exchange.sent), ("recv", n - k, exchange.received)):
            size = sizes[(exchange.own + offset) % n]
            if size:
                message = replace(
                    collective,
                    name=f"{collective.name}.{kind}{k}",
                    kind=kind,
                    bytes=size,
                    peer=Peer(collective.axes, offset),
                    channel=channel if kind == "recv" else "",
                    deps=collective.deps if kind == "send" else (),
                    shapes="",
                )
                found.append(message)
    return found


def results_of(nodes: Sequence[TemplateNode], first: int, kept: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """What must have run for the results of an op to be there, if its nodes stand from `first` on.

    It is the op's node. Of an op that makes messages, or nothing, it is what made the part that a device keeps, and the
    last receive, behind which stand all others.
    """
    if len(nodes) == 1 and nodes[0].peer is None:
        return (Ref("self", first),)
    receives = [Ref("self", at) for at, node in enumerate(nodes, first) if node.kind == "recv"]
    return tuple(dict.fromkeys((*kept, *receives[-1:])))
