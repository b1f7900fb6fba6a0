"""Bundles: what is read is what was written, whatever the size of the job, and damage is one line."""

import copy
import hashlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import stage
from stage.cli.source import open_source
from stage.errors import TraceError
from stage.io import container
from stage.io.bundle import decode_positions, encode_positions, is_bundle, open_bundle
from stage.io.bundle_job import JOB_LIMIT, MAX_MEMBERS, MAX_PATCHED, MAX_WORLD
from stage.io.container import HEAD, MAGIC, MAX_MEMBER, VERSION, open_container, write_container
from stage.traceset import TraceSet
from stage.verification import verify_path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TINY = {"layers": 4, "d_model": 64, "d_ff": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
JOBS: dict[str, dict[str, Any]] = {
    "dense": {"gpus": 8, "tp": 2, "pp": 2, "batch": 8},
    "one rank": {"gpus": 1, "batch": 1},
    "placed": {"gpus": 8, "tp": 2, "pp": 2, "batch": 8, "placement": [7, 6, 5, 4, 0, 1, 2, 3]},
    "sharded": {"gpus": 8, "pp": 2, "batch": 8, "strategy": "fsdp"},
    "unequal": {"gpus": 16, "tp": 2, "pp": 2, "cp": 2, "batch": 4, "context_balance": "none"},
    "long context": {"gpus": 16, "tp": 2, "pp": 4, "cp": 2, "batch": 4, "steps": 2},
}


def synthesize(model: str = "llama3-8b", sizes: dict[str, int] | None = None, **options: Any) -> TraceSet:
    return stage.synthesize(model, **{"sizes": TINY if sizes is None else sizes, "seq": 32, **options})


@cache
def job(name: str = "dense") -> TraceSet:
    return synthesize(**JOBS[name])


def written(path: Path, traces: TraceSet | None = None) -> Path:
    (job() if traces is None else traces).write_bundle(path / "job.stage")
    return path / "job.stage"


def opened(path: Path) -> TraceSet:
    traces = TraceSet.open(path)
    assert isinstance(traces, TraceSet)
    return traces


def content(traces: TraceSet) -> tuple[Any, ...]:
    """All that a set holds; what a damaged bundle cannot give it must refuse."""
    ranks = [traces.rank(rank) for rank in traces.ranks]
    return traces.world, traces.manifest, traces.groups, ranks


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def message(path: Path, call: Callable[[Path], object] = lambda path: content(opened(path))) -> str:
    with pytest.raises(TraceError) as caught:
        call(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text.removeprefix(f"{path} ")


@pytest.mark.parametrize("name", JOBS)
def test_what_is_read_is_what_was_written(tmp_path: Path, name: str) -> None:
    assert content(opened(written(tmp_path, job(name)))) == content(job(name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.stage"]


def test_experts_and_a_tied_embedding_are_read_as_they_were_written(tmp_path: Path) -> None:
    moe = synthesize("mixtral-8x7b", {}, gpus=8, ep=4, tp=2, batch=4)
    tied = synthesize("llama3.2-1b", {}, gpus=8, pp=4, batch=2)
    assert ("pp_ends",) in tied.classes.groups.axes
    for traces in (moe, tied):
        out = tmp_path / str(traces.description["model"])
        assert content(opened(written(out, traces))) == content(traces)


@pytest.mark.parametrize("name", JOBS)
def test_unpacked_files_are_those_written_directly(tmp_path: Path, name: str) -> None:
    job(name).write(tmp_path / "direct")
    opened(written(tmp_path, job(name))).write(tmp_path / "unpacked")
    assert files(tmp_path / "unpacked") == files(tmp_path / "direct")


def test_some_ranks_are_unpacked(tmp_path: Path) -> None:
    counts = opened(written(tmp_path)).write(tmp_path / "some", ranks=[6, 1])
    job().write(tmp_path / "direct", ranks=[6, 1])
    assert files(tmp_path / "some") == files(tmp_path / "direct")
    assert (counts["ranks"], counts["classes"]) == (2, 2)


def test_a_bundle_can_be_written_again_from_a_bundle(tmp_path: Path) -> None:
    first = written(tmp_path / "a")
    assert written(tmp_path / "b", opened(first)).read_bytes() == first.read_bytes()


def test_the_same_job_gives_the_same_bytes(tmp_path: Path) -> None:
    again = synthesize(**JOBS["dense"])
    assert written(tmp_path / "a").read_bytes() == written(tmp_path / "b", again).read_bytes()


def test_nodes_are_plain_values(tmp_path: Path) -> None:
    traces = opened(written(tmp_path))
    assert [node.name for node in traces.nodes(5)] == [node.name for node in job().nodes(5)]


def test_an_open_bundle_can_be_handed_to_another_process(tmp_path: Path) -> None:
    traces = pickle.loads(pickle.dumps(opened(written(tmp_path, job("placed")))))  # noqa: S301
    assert content(traces) == content(job("placed"))


def test_summary_and_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = job().write_bundle(tmp_path / "b.stage", progress=lambda *step: seen.append(step))
    assert seen == [(1, 2), (2, 2)]
    assert found.pop("bundle_bytes") == (tmp_path / "b.stage").stat().st_size
    assert found == job().write(tmp_path / "d")


def test_size_does_not_grow_with_ranks(tmp_path: Path) -> None:
    sizes = []
    for world in (64, 131_072):
        traces = synthesize("llama3-8b", {"layers": 8}, gpus=world, tp=4, pp=4, batch=world // 4)
        sizes.append(written(tmp_path / str(world), traces).stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 1024


def test_a_rank_is_read_without_other_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = opened(written(tmp_path))
    read: list[str] = []
    decompress = container.decompress

    def note(name: str, *rest: Any) -> bytes:
        read.append(name)
        return decompress(name, *rest)

    monkeypatch.setattr(container, "decompress", note)
    assert traces.manifest == job().manifest
    assert read == []
    for _ in range(2):
        assert traces.rank(7) == job().rank(7)
    assert read == ["image.1", "tables.1"]


def test_classes_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage.io.bundle.KEPT_BYTES", 3 * job("long context").classes.image(1).memory)
    traces = opened(written(tmp_path, job("long context")))
    for rank in traces.ranks:
        assert traces.rank(rank) == job("long context").rank(rank)
    assert 1 <= len(traces.classes._images) <= 3
    monkeypatch.setattr("stage.io.bundle.KEPT_BYTES", 1)
    traces = opened(tmp_path / "job.stage")
    assert traces.rank(0) == job("long context").rank(0)
    assert len(traces.classes._images) == 1


def test_bundles_of_earlier_releases_are_read() -> None:
    """Written once and kept: whoever changes the format raises its version and keeps a reader of this one."""
    traces = opened(DATA / "format1.stage")
    digests = json.loads((DATA / "format1.json").read_text())
    assert [hashlib.sha256(traces.rank(rank)).hexdigest() for rank in traces.ranks] == digests["ranks"]
    groups = json.dumps(traces.groups, sort_keys=True).encode()
    assert hashlib.sha256(groups).hexdigest() == digests["groups"]


@pytest.mark.parametrize("name", JOBS)
def test_the_reader_of_the_documentation_reads_every_rank(tmp_path: Path, name: str) -> None:
    text = (ROOT / "docs" / "bundle.md").read_text()
    (code,) = re.findall(r"```python[^\n]*\n(import json.*?)```", text, flags=re.DOTALL)
    reader: dict[str, Any] = {}
    exec(code, reader)  # noqa: S102
    members = reader["read_bundle"](written(tmp_path, job(name)))
    for rank in job(name).ranks:
        assert reader["rank_bytes"](members, rank) == job(name).rank(rank)


def test_limits_are_documented() -> None:
    text = (ROOT / "docs" / "bundle.md").read_text()
    sizes = [f"{MAX_MEMBER >> 30} GiB", f"{MAX_PATCHED >> 20} MiB", f"{JOB_LIMIT >> 20} MiB"]
    for limit in (f"{MAX_WORLD:,}", f"{MAX_MEMBERS:,}", *sizes):
        assert limit in text


def test_positions_round_trip() -> None:
    tables = [np.array([3, 9, 10]), np.array([], np.int64), np.array([0, 2**32 - 1])]
    assert [table.tolist() for table in decode_positions(encode_positions(tables), [3, 0, 2])] == [
        table.tolist() for table in tables
    ]


# What stands at the place


def test_an_existing_bundle_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    assert (
        message(path, job("one rank").write_bundle)
        == "exists already: give another file, or --force to replace the bundle"
    )
    assert path.read_bytes() == before
    job("one rank").write_bundle(path, force=True)
    assert opened(path).world == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.stage"]


def test_a_url_of_a_file_is_its_path(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/job.stage"
    job().write_bundle(url)
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.stage"]
    assert is_bundle(url)
    assert isinstance(TraceSet.open(url), TraceSet)
    assert verify_path(url).ok
    assert isinstance(open_source(url), TraceSet)
    assert open_source(f"file://{tmp_path}") == f"file://{tmp_path}"


@pytest.mark.parametrize("url", ["memory://b.stage", "s3://bucket/b.stage"])
def test_a_url_of_elsewhere_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for attempt in (job().write_bundle, open_bundle):
        with pytest.raises(TraceError) as caught:
            attempt(url)
        assert str(caught.value) == (
            f"{url} is a URL, but a bundle is one local file: write it to a path and copy it, "
            "or use the directory format"
        )
    assert not is_bundle(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_nothing_else_is_ever_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "mine").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(written(tmp_path))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "folder", "link", "dangling"):
        found = message(tmp_path / name, lambda path: job().write_bundle(path, force=force))
        assert found == "exists and is no bundle: give the name of a new file"
    assert (tmp_path / "mine").read_text() == "x"


def test_leftovers_of_an_interrupted_run_are_replaced_and_others_are_not(tmp_path: Path) -> None:
    partial = tmp_path / "job.stage.partial"
    partial.write_bytes(MAGIC[:5])
    written(tmp_path).unlink()
    assert not partial.exists()
    partial.write_text("mine")
    assert message(partial, lambda _: written(tmp_path)) == "is in the way and no bundle: move it elsewhere"
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.stage.partial"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    expected = "cannot be written (No space left on device), and nothing was: check space and rights"
    assert message(tmp_path / "job.stage", lambda _: written(tmp_path)) == expected
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert message(tmp_path / "file/job.stage", lambda _: written(tmp_path / "file")).startswith(
        "cannot be written ("
    )


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert "is no folder" in message(tmp_path / "nowhere", TraceSet.open)
    assert message(tmp_path / "nowhere", open_bundle).startswith("cannot be read (No such file or directory)")
    (tmp_path / "text").write_text("{}")
    expected = "is no bundle: give a folder of traces, or a file of --format bundle"
    assert message(tmp_path / "text") == expected
    assert [is_bundle(tmp_path / "text"), is_bundle(tmp_path), is_bundle(written(tmp_path))] == [
        False,
        False,
        True,
    ]
    traces = opened(tmp_path / "job.stage")
    (tmp_path / "job.stage").unlink()
    assert message(tmp_path / "job.stage", lambda _: traces.rank(0)).startswith(
        "cannot be read (No such file"
    )


# Damage by accident


def test_the_first_and_the_last_byte_are_checked_and_the_end_is_the_end(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    end = "; fetch or write it again"
    for changed, expected in {
        whole[:30]: f"is damaged: it ends within its head{end}",
        whole[:-1]: f"is damaged: it has {len(whole) - 1} bytes, but should have {len(whole)}{end}",
        whole + b"x": f"is damaged: it has {len(whole) + 1} bytes, but should have {len(whole)}{end}",
        whole[:-1] + bytes([whole[-1] ^ 1]): f"is damaged: member job does not have its checksum{end}",
        whole[:50] + b"x" + whole[51:]: f"is damaged: its directory does not have its checksum{end}",
        whole[:8] + b"\x03" + whole[9:]: "has format 3, but this release reads 1 and 2: take its release",
        whole[:15] + b"\xff" + whole[16:]: "is damaged: its directory is said to have ",
        whole.replace(b"\r\n", b"\n"): "is no bundle: give a folder of traces, or a file of --format bundle",
    }.items():
        path.write_bytes(changed)
        assert message(path).startswith(expected)


def test_damage_in_a_class_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    member = open_container(path).members["image.1"]
    whole = bytearray(path.read_bytes())
    whole[member.offset + 20] ^= 1
    path.write_bytes(whole)
    traces = opened(path)
    assert traces.rank(0) == job().rank(0)
    expected = "is damaged: member image.1 does not have its checksum; fetch or write it again"
    assert message(path, lambda _: traces.rank(7)) == expected


def test_a_file_replaced_while_it_is_open_is_not_mixed(tmp_path: Path) -> None:
    traces = opened(written(tmp_path))
    job("long context").write_bundle(tmp_path / "job.stage", force=True)
    assert "does not have its checksum" in message(tmp_path / "job.stage", lambda _: traces.rank(0))


@cache
def small() -> tuple[bytes, tuple[Any, ...]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), job("placed"))
        return path.read_bytes(), content(opened(path))


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The file with bytes changed, cut, inserted, repeated or exchanged."""
    whole = small()[0]
    places = st.one_of(
        st.integers(0, len(whole)), st.integers(0, 1200), st.integers(len(whole) - 40, len(whole))
    )
    a, b, c = sorted(draw(st.tuples(places, places, places)))
    kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "exchange", "truncate", "zero"]))
    if kind == "flip":
        at = min(a, len(whole) - 1)
        return whole[:at] + bytes([whole[at] ^ draw(st.integers(1, 255))]) + whole[at + 1 :]
    return {
        "cut": whole[:a] + whole[b:],
        "insert": whole[:a] + draw(st.binary(max_size=40)) + whole[a:],
        "repeat": whole[:b] + whole[a:],
        "exchange": whole[:a] + whole[b:c] + whole[a:b] + whole[c:],
        "truncate": whole[:a],
        "zero": whole[:a] + bytes(b - a) + whole[b:],
    }[kind]


@settings(max_examples=400, deadline=None)
@given(mutations())
def test_any_mutation_reads_identically_or_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, changed: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.stage"
    path.write_bytes(changed)
    try:
        found = content(opened(path))
    except TraceError as err:
        assert str(path) in str(err)  # noqa: PT017 - either is right
        assert "\n" not in str(err)  # noqa: PT017
    else:
        assert changed == small()[0]
        assert found == small()[1]


# Damage on purpose: every checksum is right


def forge(path: Path, **changes: Callable[[bytes], bytes | None]) -> Path:
    """The bundle with members changed (`image_0` is image.0), and checksums that agree."""
    source = open_container(path)
    members = {name: source.read(name) for name in source.members}
    for key, change in changes.items():
        name = key.replace("_", ".")
        found = change(members.pop(name))
        if found is not None:
            members[name] = found
    write_container(path, members.items(), force=True)
    return path


def forge_job(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    def edit(content: bytes) -> bytes:
        read = json.loads(content)
        change(read)
        return json.dumps(read).encode()

    return forge(path, job=edit)


def forge_directory(path: Path, change: Callable[[list[list[Any]]], object]) -> Path:
    """The bundle with another directory, its checksum right."""
    whole = path.read_bytes()
    length = HEAD.unpack_from(whole)[2]
    read = json.loads(whole[48 : 48 + length])
    change(read["members"])
    directory = json.dumps(read).encode()
    head = HEAD.pack(MAGIC, VERSION, len(directory))
    path.write_bytes(head + hashlib.sha256(head + directory).digest() + directory + whole[48 + length :])
    return path


JOB_FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no mesh": (lambda j: j.pop("mesh"), "'mesh' is missing"),
    "an atom twice": (lambda j: j["mesh"]["atoms"].append(j["mesh"]["atoms"][0]), "a mesh of ("),
    "a degree of one": (
        lambda j: j["mesh"]["atoms"][0].__setitem__(1, 1),
        "1 stands where a number from 2 to 2097152",
    ),
    "a huge world": (lambda j: j["mesh"]["atoms"].append(["x", 1 << 20]), "a mesh of ("),
    "an unknown atom": (lambda j: j["mesh"]["axes"].append(["x", ["y"]]), "'y' is not in list"),
    "scattered atoms": (
        lambda j: j["mesh"]["axes"].append(["x", ["pp", "tp"]]),
        "axis x of its mesh is no run of atoms",
    ),
    "axes that are none": (lambda j: j["groups"][0].update(axes=["y"]), "('y',) are no axes of its mesh"),
    "axes twice": (
        lambda j: j["groups"][0].update(axes=["tp", "tp"]),
        "('tp', 'tp') are no axes of its mesh",
    ),
    "other numbers": (
        lambda j: j["groups"][0].update(first=2),
        "its groups are not numbered as this release numbers them",
    ),
    "other widths": (
        lambda j: j["groups"][0].update(width=9),
        "its groups are not numbered as this release numbers them",
    ),
    "wider peers": (lambda j: j.update(peer_width=4), "its ranks are written with 4 bytes, not 3"),
    "classes over no axes": (
        lambda j: j.update(class_axes=["y"]),
        "('y',) are no axes of classes on its mesh",
    ),
    "classes without stages": (
        lambda j: j.update(class_axes=["dp"]),
        "('dp',) are no axes of classes on its mesh",
    ),
    "no class": (lambda j: j.update(classes=[]), "it has 0 classes, but by its mesh 2"),
    "three classes": (lambda j: j["classes"].append(j["classes"][0]), "it has 3 classes, but by its mesh 2"),
    "a peer beyond": (
        lambda j: j["classes"][1]["peers"][1].__setitem__(1, 2),
        "no rank of its mesh has a peer +2 over pp",
    ),
    "a peer over unknown axes": (
        lambda j: j["classes"][1]["peers"][1].__setitem__(0, ["y"]),
        "no rank of its mesh has a peer -1 over y",
    ),
    "a peer over axes twice": (
        lambda j: j["classes"][1]["peers"][1].__setitem__(0, ["pp", "pp"]),
        "no rank of its mesh has a peer -1 over pp pp",
    ),
    "a peer over nothing": (
        lambda j: j["classes"][1]["peers"][1].__setitem__(0, []),
        "no rank of its mesh has a peer itself",
    ),
    "a table of unknown axes": (
        lambda j: j["classes"][0]["groups"][0].__setitem__(0, ["y"]),
        "('y',) is missing",
    ),
    "a table twice": (
        lambda j: j["classes"][0]["groups"].append(j["classes"][0]["groups"][0]),
        "class 0 has two tables",
    ),
    "a huge table": (lambda j: j["classes"][0]["groups"][0].__setitem__(1, 1 << 24), "class 0 has 1006"),
    "a long table": (lambda j: j["classes"][0]["groups"][0].__setitem__(1, 1), "tables.0 does not have the "),
    "another image": (
        lambda j: j["classes"][0].update(sha256="0"),
        "image.0 is not the one that the job describes",
    ),
    "a class without nodes": (lambda j: j["classes"][0]["summary"].pop("nodes"), "'nodes' is missing"),
    "a description that is a list": (
        lambda j: j.update(description=[]),
        "a list stands where an object should",
    ),
    "a number that is none": (lambda j: j["description"].update(x=float("nan")), "Out of range float values"),
    "half a character": (lambda j: j["description"].update(x="\ud800"), "'utf-8' codec can't encode"),
}


@pytest.mark.parametrize("name", JOB_FORGERIES)
def test_a_job_that_makes_no_sense_is_an_error(tmp_path: Path, name: str) -> None:
    change, expected = JOB_FORGERIES[name]
    found = message(forge_job(written(tmp_path), change))
    assert found.startswith("is damaged: ")
    assert expected in found


def test_tables_that_point_outside_are_an_error(tmp_path: Path) -> None:
    path = written(tmp_path)
    size = opened(path).classes.digest(0)[0]
    expected = (
        "is damaged: tables.0 points outside of image.0, or twice to one place; fetch or write it again"
    )
    for first in (size - 5, 1 << 31, (1 << 32) - 1):
        forge(path, tables_0=lambda content, first=first: first.to_bytes(4, "little") + content[4:])  # type: ignore[misc]
        assert message(path) == expected
    forge(path, tables_0=lambda content: content[:4] + bytes(4) + content[8:])
    assert message(path) == expected


def test_members_that_are_missing_or_exchanged_are_an_error(tmp_path: Path) -> None:
    path = forge(written(tmp_path / "a"), tables_1=lambda _: None)
    assert message(path) == "is damaged: it has no member tables.1; fetch or write it again"
    path = forge_directory(
        written(tmp_path / "b"),
        lambda found: found.__setitem__(
            slice(None), [["image.1", *found[0][1:]], found[1], ["image.0", *found[2][1:]], *found[3:]]
        ),
    )
    assert (
        message(path) == "is damaged: image.0 is not the one that the job describes; fetch or write it again"
    )


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (["image.0", 1, 1 << 40, ""], "member image.0 is said to have 1099511627776 bytes"),
        (["image.0", 1, -1, ""], "member image.0 is said to have -1 bytes"),
        (["image.0", 1 << 20, 4, ""], "member image.0 is said to store 1048576 bytes for 4"),
        (["image.0", 1, "4", ""], "member image.0 is said to have '4' bytes"),
        (["image.0", 1, 4], "not enough values to unpack"),
        ([["x"], 1, 4, ""], "a name in its directory is none, or stands there twice"),
        (7, "cannot unpack non-iterable int"),
    ],
)
def test_a_directory_that_makes_no_sense_is_an_error(tmp_path: Path, entry: object, expected: str) -> None:
    path = forge_directory(written(tmp_path), lambda found: found.__setitem__(0, entry))  # type: ignore[call-overload]
    assert message(path).startswith(f"is damaged: {expected}")


def test_deep_json_is_an_error(tmp_path: Path) -> None:
    path = forge(written(tmp_path), job=lambda _: b"[" * 100_000)
    assert "recursion" in message(path)


def test_a_placement_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, job("placed"))
    forge(path, placement=lambda content: content[:4] * 8)
    assert message(path) == "is damaged: its placement does not have every rank once; fetch or write it again"
    forge(path, placement=lambda content: content[:8])
    assert message(path) == "is damaged: its placement is not one of 8 ranks; fetch or write it again"


def bomb(path: Path, stated: int, real: int) -> Path:
    """A bundle whose job is said to have `stated` bytes and decompresses to `real` zeros."""
    frame = zstandard.ZstdCompressor().compress(bytes(real))
    entry = ["job", len(frame), stated, hashlib.sha256(frame).hexdigest()]
    directory = json.dumps({"members": [entry]}).encode()
    head = HEAD.pack(MAGIC, VERSION, len(directory))
    path.write_bytes(head + hashlib.sha256(head + directory).digest() + directory + frame)
    return path


def test_a_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    path = tmp_path / "bomb.stage"
    expected = "is damaged: member job does not have the 100000 bytes that it should; fetch or write it again"
    assert message(bomb(path, 100_000, 1 << 28)) == expected
    expected = "is damaged: member job has 268435456 bytes, more than the 8388608 it may have; fetch or write it again"
    assert message(bomb(path, 1 << 28, 1 << 28)) == expected
    code = (
        "import resource, sys; from stage.io.bundle import open_bundle; from stage.errors import TraceError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: open_bundle(sys.argv[1])\n"
        "except TraceError: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    for stated in (100_000, 1 << 28):
        bomb(path, stated, 1 << 28)
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) < 30_000 * (1024 if sys.platform == "darwin" else 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything within a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in [(*path, key), *places(value[key], (*path, key))]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_forged_job_is_read_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "forged.stage").write_bytes(small()[0])
    source = open_container(folder / "forged.stage")
    read = copy.deepcopy(json.loads(source.read("job")))
    *path, last = data.draw(st.sampled_from(places(read)))
    target = read
    for key in path:
        target = target[key]
    value = data.draw(JSON | st.sampled_from([1 << 20, 1 << 21, 3, 0, -1]))
    target[last] = value
    forge(folder / "forged.stage", job=lambda _: json.dumps(read).encode())
    try:
        traces = opened(folder / "forged.stage")
        for rank in traces.ranks[:: max(1, traces.world // 8)]:
            traces.rank(rank)
        assert json.dumps(traces.manifest)
    except TraceError as err:
        assert "\n" not in str(err)  # noqa: PT017 - either is right


@pytest.mark.parametrize("exhaustive", [False, True])
def test_what_a_bundle_says_wrongly_of_its_classes_is_found(tmp_path: Path, exhaustive: bool) -> None:
    """Its checksums are right, for whoever wrote it believed it."""
    traces = job()
    told = [dict(summary) for summary in traces.summaries]
    told[1]["num_ops"] += 1
    wrong = TraceSet(traces.classes, {**traces.description, "written": 3}, told)
    report = verify_path(written(tmp_path, wrong), exhaustive=exhaustive)
    assert [defect.rule for defect in report.defects] == ["manifest", "manifest"]
    assert {defect.message.split()[0] for defect in report.defects} == {"written", "classes[1].num_ops"}
