"""The model families: exact counts, configuration files in all their variety, sizes that can be changed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stage import catalog
from stage.counting import count_block_parameters, count_flops, count_parameters
from stage.errors import ModelError
from stage.graph import Options
from stage.hf import HFConfig
from stage.model import Model, SizeValue
from stage.passes.backward import differentiate
from stage.sizes import build_model

NAMES = [entry.name for entry in catalog.list_models()]
MODULES = {entry.model_types[0]: catalog.load_model(entry.name).module for entry in catalog.list_models()}
PUBLISHED = json.loads((Path(__file__).parent / "data" / "hugging_face.json").read_text())["models"]
FLOPS = [(name, run) for name, entry in PUBLISHED.items() for run in entry["flops"]]
OPTIONS = [Options(), Options(attention="unfused", mask="full"), Options(dropout=True)]


def sizes_of(config: dict[str, Any]) -> dict[str, SizeValue]:
    module = MODULES[config["model_type"]]
    sizes: dict[str, SizeValue] = module.from_hf(HFConfig(config, "config.json"))
    return sizes


def from_config(config: dict[str, Any], options: Options | None = None, **changed: SizeValue) -> Model:
    module = MODULES[config["model_type"]]
    model: Model = module.model("a-model", {**sizes_of(config), **changed})
    return model.with_options(options or Options())


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """A published configuration with some keys changed; a value of `...` removes the key."""
    config = {**PUBLISHED[name]["config"], **changes}
    return {key: value for key, value in config.items() if value is not ...}


def kinds(model: Model) -> list[str]:
    return [block.kind for block in model.layers]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_transformers_are_met_exactly(name: str) -> None:
    assert count_parameters(from_config(PUBLISHED[name]["config"])) == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize(("name", "run"), FLOPS, ids=[f"{n}-{r['batch']}x{r['seq']}" for n, r in FLOPS])
def test_flops_of_transformers_are_met_exactly(name: str, run: dict[str, int]) -> None:
    model = from_config(PUBLISHED[name]["config"], Options(mask="full"))
    flops = count_flops(model, run["batch"], run["seq"])
    assert (flops.forward, flops.backward) == (run["forward"], run["backward"])


def test_a_sequence_longer_than_the_table_of_positions_is_among_them() -> None:
    runs = PUBLISHED["gpt3-175b-as-gpt2"]["flops"]
    assert max(run["seq"] for run in runs) > sizes_of(PUBLISHED["gpt3-175b-as-gpt2"]["config"])["positions"]


@pytest.mark.parametrize("name", NAMES)
def test_published_parameters_are_met_exactly(name: str) -> None:
    model, _ = build_model(name)
    assert count_parameters(model) == catalog.load_model(name).module.PARAMETERS[name]


def test_every_family_publishes_the_parameters_of_all_its_sizes() -> None:
    for module in MODULES.values():
        assert list(module.PARAMETERS) == list(module.VARIANTS)


@pytest.mark.parametrize("options", OPTIONS, ids=["fused", "unfused", "dropout"])
@pytest.mark.parametrize("name", NAMES)
def test_every_model_builds_differentiates_and_counts(name: str, options: Options) -> None:
    model, _ = build_model(name, options=options)
    for block in dict.fromkeys(model.blocks):
        both = differentiate(model.graph(block))
        both.forward.check()
        both.backward.check()
        assert set(both.gradients) == {tensor.name for tensor in both.forward.parameters}
        assert all(
            both.forward.tensors[t].dims == both.backward.tensors[g].dims for t, g in both.gradients.items()
        )
        assert count_block_parameters(model, block) > 0
    assert count_flops(model, 1, 512).total > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_written_once_however_many_layers_repeat_it(name: str) -> None:
    model, _ = build_model(name)
    assert len(dict.fromkeys(model.layers)) == len(set(kinds(model))) <= 2


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("llama2-7b", "llama2-7b"),
        ("meta-llama--Meta-Llama-3.1-8B", "llama3.1-8b"),
        ("meta-llama--Meta-Llama-3.1-405B", "llama3.1-405b"),
        ("mistralai--Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen--Qwen3-0.6B", "qwen3-0.6b"),
        ("Qwen--Qwen3-32B", "qwen3-32b"),
        ("Qwen--Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen--Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b-a35b"),
        ("openai--gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai--DeepSeek-V3", "deepseek-v3"),
        ("gpt3-175b-as-gpt2", "gpt3-175b"),
        ("qwen2-7b", "qwen2-7b"),
    ],
)
def test_a_configuration_gives_the_sizes_of_the_catalog(config: str, name: str) -> None:
    assert sizes_of(PUBLISHED[config]["config"]) == catalog.load_model(name).sizes


def test_missing_keys_take_the_defaults_of_the_configuration_class() -> None:
    llama = changed(
        "llama2-7b", num_key_value_heads=..., head_dim=..., tie_word_embeddings=..., attention_bias=None
    )
    assert sizes_of(llama) == sizes_of(PUBLISHED["llama2-7b"]["config"])
    mistral = changed("mistral-7b", num_key_value_heads=..., head_dim=None, sliding_window=...)
    assert sizes_of(mistral) == sizes_of(PUBLISHED["mistral-7b"]["config"])
    gpt2 = changed("gpt3-175b-as-gpt2", tie_word_embeddings=..., n_positions=...)
    assert sizes_of(gpt2) == sizes_of(PUBLISHED["gpt3-175b-as-gpt2"]["config"])
    oss = changed(
        "openai--gpt-oss-20b", layer_types=..., sliding_window=..., attention_bias=..., head_dim=...
    )
    assert sizes_of(oss) == sizes_of(PUBLISHED["openai--gpt-oss-20b"]["config"])
    deepseek = changed(
        "deepseek-ai--DeepSeek-V3", q_lora_rank=..., n_shared_experts=..., first_k_dense_replace=...
    )
    assert sizes_of(deepseek) == sizes_of(PUBLISHED["deepseek-ai--DeepSeek-V3"]["config"])
    qwen = changed("Qwen--Qwen3-30B-A3B", num_experts=..., num_local_experts=128, mlp_only_layers=None)
    assert sizes_of(qwen) == sizes_of(PUBLISHED["Qwen--Qwen3-30B-A3B"]["config"])


def test_null_and_absent_are_told_apart() -> None:
    assert sizes_of(changed("mistral-7b", sliding_window=None))["window"] == 0
    assert sizes_of(changed("mistral-7b", sliding_window=...))["window"] == 4096
    plain = changed("deepseek-ai--DeepSeek-V3", q_lora_rank=None, n_shared_experts=None)
    assert (sizes_of(plain)["q_lora_rank"], sizes_of(plain)["shared_d_ff"]) == (0, 0)
    whole = from_config(PUBLISHED["deepseek-ai--DeepSeek-V3"]["config"])
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192 - 7168 * 128 * 192
    shared = 58 * 3 * 7168 * 2048
    assert count_parameters(whole) - count_parameters(from_config(plain)) == 61 * queries + shared


def test_biases_are_counted_where_a_configuration_switches_them_on() -> None:
    plain = PUBLISHED["llama2-7b"]["config"]
    base = count_parameters(from_config(plain))
    both = count_parameters(from_config({**plain, "attention_bias": True, "mlp_bias": True}))
    assert both - base == 32 * (4 * 4096 + 2 * 11008 + 4096)
    qwen = PUBLISHED["Qwen--Qwen3-32B"]["config"]
    more = (
        count_parameters(from_config({**qwen, "attention_bias": True}))
        - PUBLISHED["Qwen--Qwen3-32B"]["parameters"]
    )
    assert more == 64 * (64 * 128 + 2 * 8 * 128 + 5120)
    deepseek = PUBLISHED["deepseek-ai--DeepSeek-V3"]
    more = (
        count_parameters(from_config({**deepseek["config"], "attention_bias": True})) - deepseek["parameters"]
    )
    assert more == 61 * (1536 + 512 + 64 + 7168)


def test_layers_alternate_as_a_configuration_says() -> None:
    oss = from_config(PUBLISHED["openai--gpt-oss-20b"]["config"])
    assert kinds(oss) == ["sliding", "full"] * 12
    assert kinds(from_config(PUBLISHED["openai--gpt-oss-20b"]["config"], layers=5))[-2:] == [
        "full",
        "sliding",
    ]
    types = ["full_attention", "sliding_attention", "sliding_attention"] * 8
    assert sizes_of(changed("openai--gpt-oss-20b", layer_types=types))["window_pattern"] == (0, 1, 1)
    assert kinds(from_config(changed("openai--gpt-oss-20b", layer_types=types)))[:4] == [
        "full",
        "sliding",
        "sliding",
        "full",
    ]
    late = changed(
        "qwen2-7b", use_sliding_window=True, sliding_window=4096, max_window_layers=20, layer_types=...
    )
    assert Counter(kinds(from_config(late))) == {"layer": 20, "sliding": 8}
    listed = changed(
        "qwen2-7b", use_sliding_window=True, layer_types=["sliding_attention"] * 28, sliding_window=...
    )
    assert kinds(from_config(listed)) == ["sliding"] * 28
    assert kinds(from_config(changed("Qwen--Qwen3-32B", use_sliding_window=True))) == ["layer"] * 64


def test_dense_and_sparse_layers_stand_where_a_configuration_says() -> None:
    deepseek = PUBLISHED["deepseek-ai--DeepSeek-V3"]["config"]
    assert kinds(from_config(deepseek))[:4] == ["dense", "dense", "dense", "moe"]
    assert kinds(from_config(deepseek, layers=2)) == ["dense", "dense"]
    assert kinds(from_config(deepseek, layers=2, first_k_dense=0)) == ["moe", "moe"]
    sparse = changed("Qwen--Qwen3-30B-A3B", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert kinds(from_config(sparse)) == ["dense", "moe", "dense", "dense", "dense", "moe"]


def test_sizes_can_be_changed_freely() -> None:
    model, _ = build_model("llama3-8b", {"layers": 3, "heads": 40, "head_dim": 96, "d_ff": 1000, "vocab": 17})
    attention = 4096 * 96 * (40 + 2 * 8 + 40)
    assert count_parameters(model) == 2 * 17 * 4096 + 3 * (attention + 3 * 4096 * 1000 + 2 * 4096) + 4096
    tied, _ = build_model("llama3-8b", {"tied": True})
    assert count_parameters(tied) == 8_030_261_248 - 128256 * 4096
    window, _ = build_model("mistral-7b-v0.3", {"window": 4096})
    plain, _ = build_model("mistral-7b-v0.3")
    assert count_flops(window, 1, 32768).forward < count_flops(plain, 1, 32768).forward


def test_modules_that_look_ahead_are_built_only_when_asked_for() -> None:
    plain, _ = build_model("deepseek-v3")
    ahead, _ = build_model("deepseek-v3", mtp=True)
    assert (plain.tied, ahead.tied) == (False, True)
    moe = next(block for block in plain.layers if block.kind == "moe")
    module = 2 * 7168**2 + 3 * 7168 + count_block_parameters(plain, moe)
    assert count_parameters(ahead) - count_parameters(plain) == module
    stored = module + 2 * 129280 * 7168  # the checkpoint has copies of the token table and the head
    assert 13.4e9 < stored < 14e9  # "671B of the main model weights and 14B of the MTP module weights"
    assert 684.4e9 < count_parameters(plain) + stored < 685e9
    more = count_flops(ahead, 1, 4096).forward - count_flops(plain, 1, 4096).forward
    assert more > 2 * 4096 * (2 * 7168**2 + 129280 * 7168)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            changed("llama2-7b", hidden_size=...),
            "config.json: key 'hidden_size' is missing; the file must give an integer there",
        ),
        (
            changed("llama2-7b", hidden_size=4100, head_dim=...),
            "config.json: hidden_size = 4100 does not divide by num_attention_heads = 32; "
            "give head_dim, or sizes that divide",
        ),
        (
            changed("gpt3-175b-as-gpt2", n_embd=100),
            "config.json: n_embd = 100 does not divide by n_head = 96; choose ones that do",
        ),
        (
            changed("openai--gpt-oss-20b", layer_types=["linear_attention"] * 24),
            "config.json: key 'layer_types' holds 'linear_attention'; known: full_attention, sliding_attention",
        ),
        (
            changed("openai--gpt-oss-20b", layer_types=["full_attention"] * 23),
            "config.json: key 'layer_types' has 23 entries, where 24 layers are; give one for each layer",
        ),
        (
            changed("Qwen--Qwen3-30B-A3B", mlp_only_layers=["first"]),
            "config.json: key 'mlp_only_layers' holds ['first'], where numbers of layers are expected",
        ),
    ],
    ids=["missing", "heads", "gpt2", "type", "short", "numbers"],
)
def test_what_a_configuration_gets_wrong_is_said_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        sizes_of(config)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["layers", "decoder_sparse_step"])
def test_a_size_that_a_model_cannot_be_built_with_is_named(name: str) -> None:
    module = MODULES["qwen3_moe"]
    with pytest.raises(ModelError) as caught:
        module.model("a-model", {**module.VARIANTS["qwen3-30b-a3b"], name: 0})
    assert str(caught.value) == f"size {name} is 0, where a number of at least 1 is needed; set {name}"
