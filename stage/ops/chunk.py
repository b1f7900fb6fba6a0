"""Changes of view: a chunk of a tensor's elements along one dim, and the tensor that chunks make up.

The dim of n elements is `blocks` runs of n / blocks, and chunk i of N has the i-th N-th of each run; so what a group of
`blocks` devices holds of chunk i after gathering it is chunk i of what they gather. A kernel writes its chunk in place,
so neither moves a byte. Chunks are made after differentiation and have no transpose.
"""

from collections.abc import Sequence
from dataclasses import replace

from stage.ops.registry import Attrs, Op, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["CHUNK", "JOIN_CHUNKS"]


def _resized(tensor: Tensor, dim: int, size: Size) -> list[tuple[tuple[Dim, ...], str]]:
    dims = list(tensor.dims)
    dims[dim] = replace(dims[dim], size=size)
    return [(tuple(dims), tensor.dtype)]


def _chunk_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    dim = attrs["dim"]
    return _resized(inputs[0], dim, inputs[0].dims[dim].size / attrs["of"])


def _join_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    dim = attrs["dim"]
    return _resized(inputs[0], dim, inputs[0].dims[dim].size * len(inputs))


def _nothing(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return 0


CHUNK = register(Op("chunk", _chunk_infer, None, _nothing, kernel=False))
JOIN_CHUNKS = register(Op("join_chunks", _join_infer, None, _nothing, kernel=False))
