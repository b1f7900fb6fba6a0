"""What software keeps in device memory besides the tensors of a model: documented, and the same for every job.

Defaults are those of Megatron-LM with Transformer Engine on PyTorch. `docs/cost.md` says where each number is from.
"""

from dataclasses import dataclass

__all__ = ["MEBIBYTE", "Runtime"]

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Runtime:
    """How a framework computes, as far as memory is concerned.

    With `fused_loss` cross entropy reads logits in the dtype they have and its gradient overwrites them (Transformer
    Engine's kernel); without, they are copied to fp32, exponentiated and kept so (Megatron-LM's default). With
    `fused_accumulation` products add into the gradient buffers of weights, and one empty gradient for each shape of a
    layer's weights stays allocated, which autograd is handed instead. `workspace` are bytes that products are given:
    PyTorch's for the forward and for the autograd thread, and Transformer Engine's, each of 32 MiB on Hopper and later.
    `fraction_reserved` is how much more than it hands out the caching allocator holds of what comes and goes; `context`
    are bytes of the CUDA context, its modules and NCCL's buffers, which no allocator sees.
    """

    fused_loss: bool = False
    fused_accumulation: bool = True
    workspace: int = 3 * 32 * MEBIBYTE
    fraction_reserved: float = 0.05
    context: int = 1536 * MEBIBYTE
