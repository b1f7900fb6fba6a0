import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import stage
from stage.cli import main
from stage.errors import StageError, TraceError
from stage.io.chakra import open_directory, write_directory
from stage.io.store import FolderStore, Store, open_store
from tests.writing import command, content, job

Capture = pytest.CaptureFixture[str]
SET = "memory://bucket/set"


@pytest.fixture(autouse=True)
def memory() -> Iterator[dict[str, object]]:
    """The files of the store in memory, none of which stays."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system.store
    system.store.clear()


def files() -> dict[str, bytes]:
    system = fsspec.filesystem("memory")
    return {path.rpartition("/")[2]: system.cat_file(path) for path in system.find("/bucket/set")}


def message(url: str, **options: bool) -> str:
    with pytest.raises(StageError) as caught:
        job().write(url, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path if request.param == "folder" else SET)


def test_stores_keep_named_files(store: Store) -> None:
    assert store.names() == []
    store.write({"a": b"one", "b": memoryview(b"two")})
    store.append("a", b" more")
    store.append("c", b"new")
    assert sorted(store.names()) == ["a", "b", "c"]
    assert (store.read("a"), store.read("b"), store.read("c")) == (b"one more", b"two", b"new")
    store.write({"a": b"again"})
    assert store.read("a") == b"again"
    store.remove(["b", "c"])
    store.remove([])
    assert (store.names(), store.has("a"), store.has("b")) == (["a"], True, False)
    assert store.where("a").endswith("/a")


def test_errors_of_a_store_are_those_of_the_system(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read("nothing")


def test_set_in_a_store_is_that_in_a_folder(tmp_path: Path) -> None:
    traces = job()
    counts = traces.write(SET)
    assert counts == traces.write(tmp_path / "out")
    assert files() == content(tmp_path / "out")
    source = stage.TraceSet.open(SET)
    assert (source.world, source.ranks, source.groups) == (16, tuple(range(16)), traces.groups)
    assert source.rank(3) == traces.rank(3)
    assert next(iter(source.nodes(3))).id == 0


def test_commands_take_urls(capsys: Capture) -> None:
    assert main(command(SET)[3:]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == SET
    assert main(["verify", SET]) == 0
    assert capsys.readouterr().out == "set: no defect\n"
    assert main(["show", f"{SET}/", "--json"]) == 0
    assert main(["show", SET, "--rank", "3"]) == 0
    capsys.readouterr()
    assert main(["show", SET, "--seq", "8"]) == 2
    assert main(["export", SET, "--to", "astra-sim", "--system", "h100", "--out", "kit"]) == 2
    assert f"{SET} is not on this machine: copy the set to a folder first" in capsys.readouterr().err


def test_file_urls_are_folders(tmp_path: Path) -> None:
    job().write(f"file://{tmp_path}/out")
    assert open_store(f"file://{tmp_path}/out") == FolderStore(tmp_path / "out")
    assert open_directory(f"file://{tmp_path}/out").world == 16
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_existing_set_is_replaced_only_by_force() -> None:
    job(32).write(SET)
    assert message(SET) == f"{SET} exists already: give another URL, or --force to replace the set in it"
    job().write(SET, force=True)
    assert stage.TraceSet.open(SET).ranks == tuple(range(16))


def test_anything_else_is_never_replaced() -> None:
    job().write(SET)
    fsspec.filesystem("memory").pipe("/bucket/set/notes.txt", b"mine")
    expected = f"{SET} holds notes.txt, which is no part of a trace set: give another URL"
    assert message(SET, force=True) == expected
    assert files()["notes.txt"] == b"mine"


def test_manifest_comes_last_and_the_journal_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from stage.io.remote import RemoteStore

    job(32).write(SET)
    done: list[str] = []
    write, remove = RemoteStore.write, RemoteStore.remove

    def noted_write(self: RemoteStore, files: dict[str, bytes]) -> None:
        done.extend(f"+{name}" for name in files)
        write(self, files)

    def noted_remove(self: RemoteStore, names: list[str]) -> None:
        done.extend(f"-{name}" for name in names)
        remove(self, names)

    monkeypatch.setattr(RemoteStore, "write", noted_write)
    monkeypatch.setattr(RemoteStore, "remove", noted_remove)
    job().write(SET, force=True)
    assert done[:2] == ["+unfinished.journal", "-manifest.json"]
    assert done[-3:] == ["+groups.json", "+manifest.json", "-unfinished.journal"]


def test_stopped_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage.io.remote.RemoteStore.__init__.__defaults__", (100_000,))

    def stop(done: int, _: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    job(32).write(SET)
    with pytest.raises(KeyboardInterrupt):
        job().write(SET, force=True, progress=stop)
    with pytest.raises(TraceError) as caught:
        open_directory(SET)
    assert str(caught.value) == f"{SET} is unfinished, its run was stopped: go on with it by --resume"
    fsspec.filesystem("memory").pipe("/bucket/set/trace.2.et", b"altered")
    seen: list[int] = []
    job().write(SET, resume=True, progress=lambda done, _: seen.append(done))
    assert seen == list(range(7, 17))
    job().write(tmp_path / "out")
    assert files() == content(tmp_path / "out")


def test_failing_store_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", fail)
    why = "NoCredentialsError: Unable to locate credentials"
    assert message(SET) == f"{SET} cannot be written ({why}), and nothing was: check space and rights"
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", fail)
    assert message(SET) == f"{SET} cannot be read ({why}): check the path and its rights"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nowhere://x/y", "nowhere://x/y cannot be used (Protocol not known: nowhere): give a path or a URL"),
        ("memory://", "memory:// names no set: give a name in it, as memory://bucket/traces"),
    ],
)
def test_url_that_cannot_be_used(url: str, text: str) -> None:
    assert message(url).startswith(text)


@pytest.mark.parametrize(
    ("url", "package", "how"),
    [
        ("s3://b/x", "s3fs", "pip install 'stage-synth[s3]'"),
        ("gs://b/x", "gcsfs", "pip install 'stage-synth[gs]'"),
        ("hdfs://b/x", "pyarrow", "install the package that it names"),
    ],
)
def test_package_that_is_missing(url: str, package: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url[: url.index(":")], raising=False)
    text = message(url)
    assert text.startswith(f"{url}: {url[: url.index(':')]}:// needs a package that is not here (")
    assert text.endswith(f"): {how}")


def test_one_process_owns_what_is_in_memory() -> None:
    with pytest.raises(StageError) as caught:
        job().write(SET, jobs=2)
    where = "write it with one job, or give a place that processes share"
    assert str(caught.value) == f"{SET} lives in one process: {where}"
    assert files() == {}


def test_plain_paths_do_without_fsspec_and_dask(tmp_path: Path) -> None:
    code = (
        "import sys; from stage.cli import main; "
        f"assert main({command(tmp_path / 'out')[3:]}) == 0; assert main(['verify', {str(tmp_path / 'out')!r}]) == 0; "
        "print([m for m in ('fsspec', 'dask', 'distributed', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['sympy']"


def test_the_function_api_takes_urls() -> None:
    write_directory(SET, 2, range(2), lambda rank: b"%d" % rank, {}, {})
    assert sorted(files()) == ["groups.json", "manifest.json", "trace.0.et", "trace.1.et"]
