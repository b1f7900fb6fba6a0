import errno
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from stage.errors import StageError, TraceError
from stage.io.chakra import DirectorySource, open_directory, write_directory
from stage.trace import wire
from stage.trace.node import Attribute, Metadata, NodeType, TraceNode

NODE = TraceNode(1, "a", NodeType.COMP, attrs={"num_ops": Attribute("int64_val", 8)})
GROUPS = {"10": [1, 0], "2": [0, 1]}


def trace(rank: int) -> bytes:
    name = TraceNode(1, f"rank {rank}", NodeType.COMP)
    return wire.frame(wire.encode_metadata("1.0.0")) + wire.frame(wire.encode_node(name))


def write(path: Path, *, world: int = 2, force: bool = False) -> DirectorySource:
    write_directory(path, world, range(world), trace, GROUPS, {"model": "x"}, force=force)
    return open_directory(path)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def message(path: Path, **others: bool) -> str:
    with pytest.raises(TraceError) as caught:
        write(path, **others) if others else open_directory(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    source = write(tmp_path / "out")
    assert (source.world, source.ranks, source.prefix) == (2, (0, 1), "trace")
    assert source.groups == GROUPS
    assert source.manifest == {"model": "x", "world": 2}
    assert [node.name for rank in source.ranks for node in source.nodes(rank)] == ["rank 0", "rank 1"]
    assert source.rank(1) == source.raw(1) == trace(1)
    assert source.metadata(0) == Metadata("1.0.0")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["groups.json", "manifest.json", "trace.0.et", "trace.1.et"]


def test_json_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert (tmp_path / "out/groups.json").read_text() == '{\n"2": [0, 1],\n"10": [1, 0]\n}\n'
    assert (tmp_path / "out/manifest.json").read_text() == '{\n "model": "x",\n "world": 2\n}\n'


def test_some_ranks_of_a_job_are_written(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = lambda done, total: seen.append((done, total))  # noqa: E731 - a name for a callback
    write_directory(tmp_path / "out", 8, [1, 5], trace, {}, {}, progress=report)
    source = open_directory(tmp_path / "out")
    assert (source.world, source.ranks, seen) == (8, (1, 5), [(1, 2), (2, 2)])
    with pytest.raises(TraceError) as caught:
        source.rank(0)
    assert str(caught.value) == f"{tmp_path / 'out'} has no trace of rank 0: it has those of 2 of 8 ranks"


def test_set_of_another_producer_is_read(tmp_path: Path) -> None:
    for rank in (0, 3):
        (tmp_path / f"job.2024.{rank}.et").write_bytes(trace(rank))
    (tmp_path / "job.2024.01.et").write_bytes(b"no trace: ranks have no leading zeros")
    (tmp_path / "notes.txt").write_text("x")
    source = open_directory(str(tmp_path))
    assert (source.prefix, source.world, source.ranks) == ("job.2024", 4, (0, 3))
    assert (source.groups, source.manifest) == ({}, None)


def test_world_follows_from_groups_without_manifest(tmp_path: Path) -> None:
    (tmp_path / "t.0.et").write_bytes(trace(0))
    (tmp_path / "groups.json").write_text('{"1": [0, 7]}')
    assert open_directory(tmp_path).world == 8


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "{} holds no file <prefix>.<rank>.et: give the folder of a trace set"),
        ({"a.0.et": "", "b.0.et": ""}, "{} holds the traces of a, b: keep one set in a folder"),
        ({"a.0.et": "", "groups.json": "{"}, "{}/groups.json is no JSON (Expecting property name enclosed"),
        ({"a.0.et": "", "groups.json": "[" * 99999}, "{}/groups.json is no JSON (maximum recursion depth"),
        ({"a.0.et": "", "groups.json": "\udcff"}, "{}/groups.json is no JSON ("),
        (
            {"a.0.et": "", "groups.json": "[]"},
            "{}/groups.json holds a list, not an object: write the set again",
        ),
        (
            {"a.0.et": "", "groups.json": '{"1": [[0]]}'},
            "{}/groups.json: group '1' is not a flat list of ranks: write [0, 1, ..]",
        ),
        (
            {"a.0.et": "", "groups.json": "{}", "manifest.json": '{"world": "2"}'},
            "{}/manifest.json: world is '2', not a number of ranks: write the set again",
        ),
        (
            {"a.0.et": "", "manifest.json": '{"world": 2}'},
            "{} has manifest.json but no groups.json: the set is incomplete, write it again",
        ),
    ],
)
def test_folder_that_is_no_set_is_an_error(tmp_path: Path, files: Mapping[str, str], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, errors="surrogateescape")
    assert message(tmp_path).startswith(text.format(tmp_path))


def test_path_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    expected = f"{tmp_path / 'x'} is no folder: give the folder that holds the .et files of a trace set"
    assert message(tmp_path / "x") == expected


def test_malformed_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "out")
    file = tmp_path / "out/trace.1.et"
    file.write_bytes(trace(1)[:-1])
    source = open_directory(tmp_path / "out")
    with pytest.raises(TraceError) as caught:
        list(source.nodes(1))
    assert str(caught.value).startswith(
        f"{file}: byte 8: a message of 12 bytes starts here but only 11 bytes follow"
    )
    file.write_bytes(b"")
    with pytest.raises(TraceError) as caught:
        source.metadata(1)
    assert str(caught.value) == f"{file}: the trace is empty: write it again"


def test_existing_folder_is_refused_without_force(tmp_path: Path) -> None:
    write(tmp_path / "out")
    expected = f"{tmp_path / 'out'} exists already: give another folder, or --force to replace the set in it"
    assert message(tmp_path / "out", force=False) == expected


def test_existing_set_is_replaced_with_force(tmp_path: Path) -> None:
    write(tmp_path / "out", world=4)
    assert write(tmp_path / "out", force=True).ranks == (0, 1)
    assert names(tmp_path) == ["out"]
    assert len(names(tmp_path / "out")) == 4


@pytest.mark.parametrize("name", ["notes.txt", "sub"])
def test_folder_with_anything_else_is_never_replaced(tmp_path: Path, name: str) -> None:
    write(tmp_path / "out")
    if name == "sub":
        (tmp_path / "out/sub").mkdir()
    else:
        (tmp_path / "out/notes.txt").write_text("mine")
    expected = f"{tmp_path / 'out'} holds {name}, which is no part of a trace set: give another folder"
    assert message(tmp_path / "out", force=True) == expected
    assert name in names(tmp_path / "out")


def test_file_or_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        assert "exists and is no folder" in message(tmp_path / name, force=True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), StageError("x")]
)
def test_interrupted_write_leaves_what_stood_there(tmp_path: Path, error: BaseException) -> None:
    write(tmp_path / "out", world=1)

    def fail(rank: int) -> bytes:
        if rank:
            raise error
        return b"half"

    kind = TraceError if isinstance(error, OSError) else type(error)
    for name in ("out", "new"):
        with pytest.raises(kind) as caught:
            write_directory(tmp_path / name, 2, range(2), fail, {}, {}, force=True)
    if isinstance(error, OSError):
        left = f"1 of 2 ranks are in {tmp_path / 'new.partial'}; check space and rights, then --resume"
        expected = f"{tmp_path / 'new'} cannot be written (No space left on device): {left}"
        assert str(caught.value) == expected
    assert names(tmp_path) == ["new.partial", "out", "out.partial"]
    assert open_directory(tmp_path / "out").rank(0) == trace(0)


def test_failure_before_the_first_rank_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: int) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TraceError) as caught:
        write_directory(tmp_path / "out", 2, range(2), fail, {}, {})
    why = "(No space left on device), and nothing was: check space and rights"
    assert str(caught.value) == f"{tmp_path / 'out'} cannot be written {why}"
    assert names(tmp_path) == []


def test_failed_replacement_leaves_what_stood_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", world=1)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "out.partial":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert "Device or resource busy" in message(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out", "out.partial"]
    assert open_directory(tmp_path / "out").ranks == (0,)


def test_leftovers_of_an_interrupted_run_are_cleared(tmp_path: Path) -> None:
    for name in ("out", "out.partial", "out.replaced"):
        write(tmp_path / name, world=3)
    assert write(tmp_path / "out", force=True).ranks == (0, 1)
    assert names(tmp_path) == ["out"]


def test_foreign_folder_in_the_way_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/mine").write_text("x")
    expected = f"{tmp_path / 'out.partial'} is in the way and no trace set: move it elsewhere"
    assert message(tmp_path / "out", force=False) == expected
    assert names(tmp_path) == ["out.partial"]


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = message(tmp_path / "file/out", force=False)
    assert text.startswith(f"{tmp_path / 'file/out'} cannot be written (Not a directory)")


def test_manifest_is_written_last(tmp_path: Path) -> None:
    state: list[list[str]] = []

    def observe(rank: int) -> bytes:
        state.append(names(tmp_path / "out.partial"))
        return trace(rank)

    write_directory(tmp_path / "out", 2, [0, 1], observe, {}, {})
    assert state == [["unfinished.journal"], ["trace.0.et", "unfinished.journal"]]
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == {"world": 2}
