"""Reading configuration files: every surprise is one line that names the file and the key."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.errors import ModelError
from stage.hf import HFConfig, parse_config

CONFIG = HFConfig(
    {
        "hidden_size": 64,
        "eps": 1,
        "tied": True,
        "head_dim": None,
        "rope": {"theta": 1.5},
        "zero": 0,
        "act": "silu",
    },
    "dir/config.json",
)


def test_values_have_the_type_asked_for() -> None:
    assert CONFIG.require("hidden_size", int) == 64
    assert CONFIG.require("eps", float) == 1.0
    assert CONFIG.require("tied", bool) is True
    assert CONFIG.get("act", "gelu", str) == "silu"
    assert CONFIG.section("rope").require("theta", float) == 1.5
    assert CONFIG.get("zero", 3, int, minimum=0) == 0


def test_null_and_missing_take_the_default() -> None:
    assert CONFIG.get("head_dim", 16, int) == 16
    assert CONFIG.get("window", None, int) is None
    assert CONFIG.get("window") is None
    assert CONFIG.get("hidden_size") == 64


def test_it_is_a_mapping() -> None:
    assert dict(CONFIG)["act"] == "silu"
    assert "eps" in CONFIG
    assert len(CONFIG) == 7


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda: CONFIG["vocab"], "key 'vocab' is missing"),
        (lambda: CONFIG.require("vocab", int), "key 'vocab' is missing; the file must give an integer there"),
        (
            lambda: CONFIG.require("head_dim", int),
            "key 'head_dim' is null; the file must give an integer there",
        ),
        (lambda: CONFIG.require("tied", int), "key 'tied' is true, where an integer is expected"),
        (lambda: CONFIG.require("eps", bool), "key 'eps' is 1, where true or false is expected"),
        (lambda: CONFIG.require("act", float), "key 'act' is \"silu\", where a number is expected"),
        (lambda: CONFIG.require("rope", list), "key 'rope' is a JSON object, where a list is expected"),
        (lambda: CONFIG.get("zero", 1, int), "key 'zero' is 0, where an integer of at least 1 is expected"),
        (lambda: CONFIG.section("act"), "key 'act' is \"silu\", where an object is expected"),
        (
            lambda: CONFIG.section("rope").require("factor", float),
            "key 'rope.factor' is missing; the file must give a number there",
        ),
    ],
)
def test_complaints_name_file_key_and_what_is_expected(read: Callable[[], object], problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        read()
    assert str(caught.value) == f"dir/config.json: {problem}"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            b"{\n 'a': 1}",
            "not valid JSON: Expecting property name enclosed in double quotes at line 2, column 2",
        ),
        (b"", "not valid JSON: Expecting value at line 1, column 1"),
        (b"[1]", "holds a JSON list, where an object of keys is expected"),
        (b"3", "holds 3, where an object of keys is expected"),
    ],
)
def test_malformed_files_are_named_with_the_position(data: bytes, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config(data, "c.json")
    assert str(caught.value) == f"c.json: {problem}"


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b'{"a":' + b"9" * 5000 + b"}", b"[" * 200_000])
def test_absurd_files_are_one_line_too(data: bytes) -> None:
    with pytest.raises(ModelError, match=r"^c\.json: not readable as JSON: [^\n]*$"):
        parse_config(data, "c.json")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_config_or_a_model_error(data: bytes) -> None:
    try:
        config = parse_config(data, "c.json")
    except ModelError as err:
        assert "\n" not in str(err)  # noqa: PT017  # the point is that no other error gets out
    else:
        assert isinstance(config, HFConfig)
