"""The small languages of options, and the text of every complaint about them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.cli import main
from stage.cli.parse import parse_ranks, parse_sizes, parse_stage_layers, read_placement
from stage.errors import StageError


def complaint(read: Callable[[], object]) -> str:
    with pytest.raises(StageError) as caught:
        read()
    return str(caught.value)


def test_stage_layers_repeat() -> None:
    layers = parse_stage_layers("7,8x14,7")
    assert (len(layers), sum(layers), layers[0], layers[1]) == (16, 126, 7, 8)
    assert parse_stage_layers(" 4 , 0 ") == [4, 0]


@pytest.mark.parametrize("part", ["", "x", "8y14", "8x", "8x0", "-1", "1.5", "8x99999999", "9" * 30, "٣"])
def test_wrong_stage_layers_are_named(part: str) -> None:
    assert complaint(lambda: parse_stage_layers(f"7,{part}")) == (
        f"--stage-layers '7,{part}': '{part}' is not LAYERS or LAYERSxSTAGES; "
        "write the layers of each stage in order, as in 7,8x14,7"
    )


def test_ranks_are_ascending_and_once() -> None:
    assert parse_ranks("64,0-3,2-4") == [0, 1, 2, 3, 4, 64]
    assert parse_ranks("5-5") == [5]


@pytest.mark.parametrize("part", ["", "a", "3-1", "-2", "1-", "0-7-9", "1.0"])
def test_wrong_ranks_are_named(part: str) -> None:
    assert complaint(lambda: parse_ranks(f"1,{part}")) == (
        f"--ranks '1,{part}': '{part}' is not RANK or FIRST-LAST; write ranks and ascending ranges, as in 0-7,64"
    )


def test_absurdly_many_ranks_are_refused_before_they_are_listed() -> None:
    assert complaint(lambda: parse_ranks("0-999999999")) == (
        "--ranks '0-999999999': lists more than 4,194,304 ranks; write fewer at a time"
    )


@given(st.sets(st.integers(0, 500), min_size=1))
def test_ranks_read_back(ranks: set[int]) -> None:
    assert parse_ranks(",".join(map(str, ranks))) == sorted(ranks)


def test_sizes_come_in_one_option_or_several() -> None:
    assert parse_sizes(["a=1,b=2", "c=1_000"]) == {"a": 1, "b": 2, "c": 1000}
    assert parse_sizes([]) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "layers",
            "--set 'layers': 'layers' is not NAME=NUMBER; write the sizes to change, as in d_model=20480,layers=120",
        ),
        (
            "a=1,=2",
            "--set 'a=1,=2': '=2' is not NAME=NUMBER; write the sizes to change, as in d_model=20480,layers=120",
        ),
        ("a=-1", "--set 'a=-1': size 'a' is '-1'; write a whole number that is not negative"),
        ("a=4k", "--set 'a=4k': size 'a' is '4k'; write a whole number that is not negative"),
        ("a=", "--set 'a=': size 'a' is ''; write a whole number that is not negative"),
        (
            "a=" + "9" * 90,
            f"--set 'a={'9' * 55}...': size 'a' is '{'9' * 57}...'; write a whole number that is not negative",
        ),
        ("a=1,a=2", "--set: size 'a' is given twice; give it once"),
    ],
)
def test_wrong_sizes_are_named(text: str, message: str) -> None:
    assert complaint(lambda: parse_sizes([text])) == message


def test_placement_is_a_permutation(tmp_path: Path) -> None:
    path = tmp_path / "placement"
    path.write_text("# two nodes\n2 3\n0, 1  # the rest\n")
    assert read_placement(path) == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0\n1\nx\n", "line 3: 'x' is not a rank; write 0, 1, ..."),
        ("-1", "line 1: '-1' is not a rank; write 0, 1, ..."),
        ("# nothing\n", "holds no ranks; write one for each place of the mesh"),
        ("0 1 1", "rank 1 appears twice; the file holds 3 ranks, so each of 0 to 2 must appear once"),
        ("0 3 1", "rank 3 is not below 3; the file holds 3 ranks, so each of 0 to 2 must appear once"),
    ],
)
def test_wrong_placements_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "placement"
    path.write_text(text)
    assert complaint(lambda: read_placement(path)) == f"--placement {path}: {message}"


def test_unreadable_placements_are_named(tmp_path: Path) -> None:
    path = tmp_path / "placement"
    assert complaint(lambda: read_placement(path)) == (
        f"--placement {path}: cannot be read: No such file or directory"
    )
    path.write_bytes(b"0 \xff")
    assert complaint(lambda: read_placement(path)) == f"--placement {path}: not a text file in UTF-8 (byte 2)"


@pytest.mark.parametrize(
    "line",
    [
        "synth llama3-8b --out OUT --placement PIPE",
        "synth llama3-8b --out OUT --strategy PIPE",
        "synth mixtral-8x7b --out OUT --expert-load PIPE",
        "synth PIPE --out OUT",
        "systems PIPE",
        "bench-accuracy --set korthikanti2022_table5_e2e --rows PIPE",
    ],
)
@pytest.mark.parametrize("suffix", [".toml", ".csv", ".json"])
def test_a_pipe_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, suffix: str
) -> None:
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    command = line.replace("PIPE", str(pipe)).replace("OUT", str(tmp_path / "out"))
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("stage: error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
