"""A model: named sizes, and a list of blocks each written once as a single-device program.

A model file defines `model(sizes) -> Model` and tables of published sizes; see `models/llama.py`. Blocks of
one kind have one program, however many layers repeat it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from stage.errors import ModelError
from stage.graph import Builder, Graph, Options
from stage.tensor import Tensor

__all__ = ["Block", "Model", "SizeValue", "block_graph"]

SizeValue = int | bool | tuple[int, ...]
"""A number; a switch of a part (`tied`); or numbers that tell layers apart (`window_pattern`)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A kind of block: its name and its program.

    `build(b, tokens)` of an embedding returns x[batch, seq, d_model]; `build(b, x)` of a layer returns the
    same shape; `build(b, x, labels)` of a head returns the loss of every position.
    """

    kind: str
    build: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """The blocks of a model in order, and its sizes.

    `sizes` holds every named size by value: `layers d_model heads vocab seq ...`; `seq` is the model's own
    sequence length. `tied` says that the head's block has the token table too, to multiply by it or to look
    tokens up.
    """

    name: str
    sizes: Mapping[str, SizeValue]
    embedding: Block
    layers: tuple[Block, ...]
    head: Block
    tied: bool = False
    moe: bool = False
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ModelError(f"{self.name} has no layers; set layers to at least 1")

    @property
    def values(self) -> dict[str, int]:
        """The sizes that are numbers."""
        return {
            name: value
            for name, value in self.sizes.items()
            if isinstance(value, int) and not isinstance(value, bool)
        }

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Embedding, layers, head."""
        return (self.embedding, *self.layers, self.head)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts, and -1 at the end for a head that has some, to look ahead."""
        sparse = {
            block: any("experts" in tensor.dim_names for tensor in self.graph(block).tensors.values())
            for block in dict.fromkeys(self.blocks)
        }
        layers = tuple(number for number, block in enumerate(self.layers) if sparse[block])
        return (*layers, -1) if sparse[self.head] else layers

    def with_options(self, options: Options) -> "Model":
        """The same model under other options."""
        return replace(self, options=options)

    def graph(self, block: Block) -> Graph:
        """The unsharded forward graph of one of the blocks."""
        role = "embedding" if block == self.embedding else "head" if block == self.head else "layer"
        return block_graph(block, role, self.options)


@lru_cache(maxsize=256)
def block_graph(block: Block, role: str, options: Options) -> Graph:
    """The forward graph of a block that stands where `role` says: embedding, layer or head."""
    b = Builder(block.kind, options)
    if role == "embedding":
        return b.graph(block.build(b, b.input("tokens", "batch", "seq", dtype="int64")))
    x = b.input("x", "batch", "seq", "d_model")
    if role == "layer":
        return b.graph(block.build(b, x))
    return b.graph(block.build(b, x, b.input("labels", "batch", "seq", dtype="int64")))
