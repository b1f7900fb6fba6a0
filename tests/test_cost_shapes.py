"""Sizes of products and attention of real jobs, by hand from the sizes of the models."""

from functools import cache
from typing import Any

import pytest

from stage.cost.pricing import kernel_of
from stage.cost.shapes import Attention, Product, attention_of, product_of
from stage.cost.work import Kernel
from stage.request import resolve_request
from stage.synthesis import job

JOBS = {
    "llama3-8b": {"gpus": 8, "tp": 2, "batch": 8, "seq": 4096},
    "gpt3-175b": {"gpus": 16, "tp": 8, "pp": 2, "batch": 8, "seq": 2048},
    "mixtral-8x7b": {"gpus": 8, "ep": 4, "batch": 8, "seq": 4096},
    "deepseek-v3": {"gpus": 64, "ep": 32, "batch": 64, "seq": 4096},
}


@cache
def kernels_of(model: str, attention: str = "fused") -> dict[str, Kernel]:
    """The kernels of a job by name, one of each."""
    made = job(resolve_request(model, attention=attention, **JOBS[model]))  # type: ignore[arg-type]
    nodes = (n for p in made.programs for t in p.templates for n in t.nodes if n.is_compute)
    return {node.name: kernel_of(node) for node in nodes}


PRODUCTS = [
    # 32 heads of 128 and 8 KV heads over tp 2: 2,048 + 512 + 512 columns of 4,096 rows
    ("llama3-8b", "attn.qkv_proj", (1, 4096, 2048 + 512 + 512, 4096)),
    ("llama3-8b", "attn.qkv_proj.dgrad", (1, 4096, 4096, 3072)),
    ("llama3-8b", "attn.qkv_proj.wgrad", (1, 4096, 3072, 4096)),
    ("llama3-8b", "attn.o_proj", (1, 4096, 4096, 2048)),
    ("llama3-8b", "mlp.gate_up_proj", (1, 4096, 14336, 4096)),  # 2 x 14,336 / 2
    ("llama3-8b", "mlp.down_proj.wgrad", (1, 7168, 4096, 4096)),
    ("llama3-8b", "lm_head", (1, 4096, 128256 // 2, 4096)),
    ("gpt3-175b", "attn.qkv_proj", (1, 2048, 3 * 12288 // 8, 12288)),  # with a bias for each
    ("gpt3-175b", "mlp.up_proj", (1, 2048, 4 * 12288 // 8, 12288)),
    ("gpt3-175b", "mlp.up_proj.wgrad", (1, 12288, 6144, 2048)),
    # 8 experts over ep 4; 4 ranks x 4,096 tokens x 2 of 8 experts
    ("mixtral-8x7b", "moe.experts.gate_up_proj", (2, 4 * 4096 * 2 // 8, 2 * 14336, 4096)),
    ("mixtral-8x7b", "moe.experts.down_proj.dgrad", (2, 4096, 14336, 4096)),
    ("mixtral-8x7b", "moe.experts.gate_up_proj.wgrad", (2, 4096, 28672, 4096)),
    ("mixtral-8x7b", "moe.router", (1, 4096, 8, 4096)),
    # 256 experts over ep 32; 32 x 4,096 x 8 / 256 tokens each
    ("deepseek-v3", "moe.experts.gate_up_proj", (8, 4096, 2 * 2048, 7168)),
    ("deepseek-v3", "moe.experts.gate_up_proj.dgrad", (8, 4096, 7168, 4096)),
    ("deepseek-v3", "moe.experts.down_proj.wgrad", (8, 2048, 7168, 4096)),
    ("deepseek-v3", "moe.shared.gate_up_proj.dgrad", (1, 4096, 7168, 4096)),  # added into a cotangent
    ("deepseek-v3", "attn.q_b_proj", (1, 4096, 128 * 192, 1536)),
    ("deepseek-v3", "attn.kv_a_proj", (1, 4096, 512 + 64, 7168)),
    ("deepseek-v3", "attn.kv_b_proj.wgrad", (1, 512, 128 * 256, 4096)),
]


@pytest.mark.parametrize(("model", "name", "sizes"), PRODUCTS)
def test_products_of_a_job(model: str, name: str, sizes: tuple[float, ...]) -> None:
    product = kernels_of(model)[name].product
    assert product == pytest.approx(sizes, rel=1e-12)


@pytest.mark.parametrize("model", JOBS)
def test_every_matrix_op_of_a_job_has_sizes_that_multiply_to_its_flops(model: str) -> None:
    found = [kernel for kernel in kernels_of(model).values() if kernel.matmul]
    assert len(found) > 12
    for kernel in found:
        if kernel.attention is None:
            assert kernel.product is not None, kernel
            groups, m, n, k = kernel.product
            assert 2 * groups * m * n * k == pytest.approx(kernel.flops, rel=1e-9)
        else:
            assert kernel.product is None
            assert kernel.attention.share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [  # 16 heads in 4 groups of KV heads, over 4,096 tokens: all pairs, whatever the mask
        ("attn.core.scores", (4, 4 * 4096, 4096, 128)),
        ("attn.core.values", (4, 4 * 4096, 128, 4096)),
        ("attn.core.scores.dgrad", (4, 4 * 4096, 128, 4096)),
        ("attn.core.scores.wgrad", (4, 128, 4096, 4 * 4096)),
        ("attn.core.values.wgrad", (4, 4096, 128, 4 * 4096)),
    ],
)
def test_unfused_attention_multiplies_all_pairs(name: str, sizes: tuple[float, ...]) -> None:
    kernel = kernels_of("llama3-8b", "unfused")[name]
    assert kernel.product == pytest.approx(sizes)
    assert kernel.flops == pytest.approx(16 * 4096 * 4096 * 128)  # of which the mask leaves half


def test_attention_of_jobs() -> None:
    llama, deepseek = kernels_of("llama3-8b"), kernels_of("deepseek-v3")
    for name in ("attn.core", "attn.core.backward"):
        assert llama[name].attention == Attention(1, 16, 4, 4096, 4096, 128, 128, 0.5)
        assert deepseek[name].attention == Attention(1, 128, 128, 4096, 4096, 192, 128, 0.5)
    assert llama["attn.core"].attention is not None
    assert llama["attn.core"].attention.pairs == 16 * 4096 * 4096 / 2


def test_window_leaves_few_pairs() -> None:
    # Of 4,096 keys a window of 128 leaves 128 - 128^2 / (2 x 4,096) a query.
    keys = 128 - 128**2 / 8192
    shapes = [(1.0, 4096.0, 64.0, 64.0), (1.0, 4096.0, 8.0, 64.0), (1.0, 4096.0, 8.0, 64.0)]
    found = attention_of("attention", 4 * 64 * 4096 * keys * 64, shapes)
    assert found is not None
    assert found.share == pytest.approx(keys / 4096)


@pytest.mark.parametrize("model", JOBS)
def test_gradients_of_weights_multiply_16_bits(model: str) -> None:
    """Their dtype is that of the fp32 gradients they are added into; what is multiplied is bf16."""
    gradients = [kernel for name, kernel in kernels_of(model).items() if name.endswith(".wgrad")]
    assert gradients
    assert {kernel.dtype for kernel in gradients} == {"fp32"}
    assert {kernel.multiplies for kernel in gradients} == {"bf16"}


def test_attention_whose_gradients_travel_in_fp32_multiplies_16_bits() -> None:
    """Around a ring of two, gradients of 8 KV heads of 128 are fp32, all else that a rank touches is bf16."""
    options: dict[str, Any] = {"cp": 2, "context": "ring", "batch": 1, "seq": 4096, "sizes": {"layers": 1}}
    for dtype, multiplied in (("bf16", "bf16"), ("fp32", "fp32")):
        made = job(resolve_request("llama3-8b", dtype=dtype, **options))
        nodes = [node for template in made.programs[0].templates for node in template.nodes]
        kernels = [kernel_of(node) for node in nodes if node.op == "attention_backward"]
        assert "fp32" in {kernel.dtype for kernel in kernels}
        assert {kernel.multiplies for kernel in kernels} == {multiplied}


def test_shapes_may_be_fractions() -> None:
    assert Kernel("permute_tokens", "bf16", 0, 0, "6144/5x2->3").operands == ((1228.8, 2.0),)


def test_product_in_fp32_stays_one() -> None:
    shapes = "64x32,32x16->64x16"
    moved = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert Kernel("contract", "fp32", 2 * 64 * 32 * 16, moved, shapes, matmul=True).multiplies == "fp32"


def test_sizes_that_are_not_known() -> None:
    assert Kernel("contract", "bf16", 1000, 10, "", matmul=True).product is None
    assert Kernel("add", "bf16", 8, 48, "8,8->8").product is None
    assert product_of("contract", 0, [(2, 2), (2, 2)], [(2, 2)]) is None
    assert attention_of("attention", 1, [(2, 2), (2, 2), (2, 2)]) is None
    assert attention_of("norm", 1, [(1, 8, 1, 4)] * 3) is None
    assert product_of("contract", 2 * 60, [(4, 3), (3, 5)], [(4, 5)]) == Product(1, 4, 5, 3)
