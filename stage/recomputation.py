"""Which activations are computed again in backward: one policy for all layers, as it is written in options and files.

`none`; `full`: a layer's input alone is kept; `every:K`: the layers K, 2K, ... of each pipeline stage, counted from 1,
are recomputed in full and the others keep all (torchtitan's `selective_ac_option` with a number; Megatron-LM's `block`
recomputes the first layers of a stage instead); `ops:NAME,...`: parts of every layer, by the names in `MODULES`;
`selective`: the attention core (Korthikanti et al. 2022, section 5), which is `ops:attention`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from stage.errors import StrategyError

if TYPE_CHECKING:  # strategies are read without what computes with symbols
    from stage.graph import Node

__all__ = ["MODULES", "NO_RECOMPUTATION", "POLICIES", "Module", "Recomputation", "parse_recomputation"]

POLICIES = ("none", "full", "selective", "every:K", "ops:NAME,...")
"""How a policy is written."""


@dataclass(frozen=True, slots=True)
class Module:
    """A part of a layer that can be computed again.

    `matches` says which forward nodes belong to it. A `whole` one is run again from its inputs once backward reads
    anything of it, reductions included, and its result is kept where others read it (Megatron-LM's checkpoint); one
    that `gathers` does so with its own input too, where the attention core is given gathered keys and values. Any
    other keeps not even its result: what backward reads of it is made again, with what moves or rotates it on its way
    to its reader, collectives included (Megatron-LM's output-discarding checkpoint).
    """

    matches: Callable[["Node"], bool]
    whole: bool = False
    gathers: bool = False


def _within(*scope: str) -> Callable[["Node"], bool]:
    """Nodes in a scope but for its norm, dropout, bias and residual, which stand around a module."""
    around = ("norm", "dropout", "add_bias", "residual")

    def matches(node: "Node") -> bool:
        path = tuple(node.name.split("."))
        return any(
            path[i : i + len(scope)] == scope and path[i + len(scope)] not in around
            for i in range(len(path) - len(scope))
        )

    return matches


def _called(*names: str, scope: str = "") -> Callable[["Node"], bool]:
    """Nodes by the last part of their name, in a scope of that name if given."""

    def matches(node: "Node") -> bool:
        *path, last = node.name.split(".")
        return last in names and (not scope or scope in path)

    return matches


def _core(node: "Node") -> bool:
    return "core" in node.name.split(".")


def _norm(node: "Node") -> bool:
    return node.op in ("norm", "norm_scale")


MODULES: dict[str, Module] = {
    "attention": Module(_core, whole=True),
    "core_attn": Module(_core, whole=True),
    "norm": Module(_norm),
    "layernorm": Module(_called("norm")),
    "up_proj": Module(_called("up_proj", "gate_proj", "gate_up_proj")),
    "act": Module(_called("act")),
    "mlp": Module(_within("mlp"), whole=True, gathers=True),
    "mla_up_proj": Module(_called("q_b_proj", "kv_b_proj")),
    "moe": Module(_within("moe"), whole=True, gathers=True),
    "moe_act": Module(_called("act", scope="experts")),
    "shared_experts": Module(_within("moe", "shared"), whole=True, gathers=True),
    "dispatch": Module(_called("permute", "permute_probs", "sort")),
}
"""Parts of layers by name: those of Megatron-LM's `--recompute-modules` (`core_attn`, `layernorm`, `mlp`,
`mla_up_proj`, `moe`, `moe_act`, `shared_experts`), and `attention` (as `core_attn`), `norm` (every norm, also those of
queries, keys and latents), `up_proj` (products into the hidden size, of experts too), `act` (every activation function)
and `dispatch` (tokens on their way to experts)."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A policy: `none`, `full`, or `ops` with the names of its `modules`, for `every` K-th layer of a stage.

    >>> parse_recomputation("every:2").chooses(0), parse_recomputation("every:2").chooses(1)
    (False, True)
    """

    text: str
    kind: str
    every: int = 1
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def chooses(self, position: int) -> bool:
        """Whether the layer at this position of its stage, counted from 0, is recomputed."""
        return self.kind != "none" and (position + 1) % self.every == 0


NO_RECOMPUTATION = Recomputation("none", "none")


def parse_recomputation(text: str) -> Recomputation:
    """The policy that a text asks for; a `StrategyError` says what is wrong with it.

    >>> parse_recomputation("ops:attention,norm").modules
    ('attention', 'norm')
    """
    head, colon, rest = text.partition(":")
    if not colon and head in ("none", "full"):
        return Recomputation(text, head)
    if text == "selective":
        return Recomputation(text, "ops", modules=("attention",))
    if colon and head == "every" and re.fullmatch("[1-9][0-9]{0,5}", rest):
        return Recomputation(text, "full", every=int(rest))
    if colon and head == "ops":
        return Recomputation(text, "ops", modules=_modules(text, rest.split(",")))
    near = get_close_matches(head, ("none", "full", "selective", "every:K", "ops:NAME"), n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise StrategyError(f"recompute is {text!r}{hint}; known: {', '.join(POLICIES)}")


def _modules(text: str, names: Iterable[str]) -> tuple[str, ...]:
    found = tuple(name.strip() for name in names)
    for name in found:
        if name not in MODULES:
            near = get_close_matches(name, MODULES, n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise StrategyError(
                f"recompute is {text!r}: unknown op {name!r}{hint}; known: {', '.join(MODULES)}"
            )
    if len({MODULES[name].matches for name in found}) < len(found):
        raise StrategyError(f"recompute is {text!r}; each op may appear once")
    return found
