import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stage.cli import main
from stage.errors import TraceError
from stage.io.chakra import open_directory, write_directory
from tests.writing import command, content, job, start, wait_for_ranks

RANKS = 8192  # of one small layer, so that a run takes long enough to be stopped, and little disk
Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)


def damage(partial: Path) -> tuple[set[str], list[Path]]:
    """Truncates, alters and removes ranks that are noted; the names of the others and the three."""
    noted = [line.split() for line in (partial / "unfinished.journal").read_bytes().split(b"\n")[1:-1]]
    files = [partial / f"trace.{int(fields[0])}.et" for fields in noted]
    cut, altered, lost, *intact = files
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(altered.read_bytes())
    data[len(data) // 2] ^= 1
    altered.write_bytes(data)
    lost.unlink()
    return {path.name for path in intact}, [cut, altered, lost]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--jobs", "2")], ids=["one", "jobs"])
def test_a_killed_run_is_resumed(tmp_path: Path, more: tuple[str, ...]) -> None:
    out, partial, whole = tmp_path / "out", tmp_path / "out.partial", tmp_path / "whole"
    process = start(*command(out, *more, gpus=RANKS, layers=1))
    wait_for_ranks(process, partial, 100)
    process.kill()
    process.communicate()
    assert not out.exists()
    assert not (partial / "manifest.json").exists()
    refused = run(sys.executable, "-m", "stage", "verify", str(partial))
    assert refused.returncode == 2
    assert refused.stderr == (
        f"stage: error: {partial} is unfinished, its run was stopped: go on with it by --resume\n"
    )
    intact, damaged = damage(partial)
    (partial / "trace.99999.et").write_bytes(b"of no rank")
    before = {name: (partial / name).stat().st_mtime_ns for name in intact}

    done = run(*command(out, "--resume", *more, gpus=RANKS, layers=1))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == RANKS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert {name: (out / name).stat().st_mtime_ns for name in intact} == before
    assert all((out / path.name).exists() for path in damaged)
    job(RANKS, layers=1).write(whole)
    assert content(out) == content(whole)


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_written(tmp_path: Path) -> None:
    process = start(*command(tmp_path / "out", gpus=RANKS, layers=1))
    wait_for_ranks(process, tmp_path / "out.partial", 100)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.startswith("stage: interrupted: ")
    assert errors.endswith(
        f" of 8,192 ranks are in {tmp_path / 'out.partial'}; --resume goes on from there\n"
    )
    assert errors.count("\n") == 1


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_disk_that_takes_no_more_keeps_what_is_written(tmp_path: Path, jobs: str) -> None:
    traces, out = job(), tmp_path / "out"
    small, large = sorted(len(traces.rank(rank)) for rank in (0, 15))
    assert small < large
    limits = (small + large) // 2, resource.RLIM_INFINITY
    done = subprocess.run(
        command(out, "--jobs", jobs),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"stage: error: {out} cannot be written (File too large)")
    assert done.stderr.count("\n") == 1
    assert not out.exists()
    if "resume" in done.stderr:
        assert not (tmp_path / "out.partial" / "manifest.json").exists()
    assert run(*command(out, "--jobs", jobs, "--resume")).returncode == 0
    traces.write(tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def stop_after(count: int, folder: Path, *, resume: bool = False) -> None:
    """Leaves `count` ranks of the small job in `<folder>.partial`."""

    def stop(done: int, _: int) -> None:
        if done == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job().write(folder, resume=resume, progress=stop)
    assert not folder.exists()


def test_what_an_interrupt_says(tmp_path: Path) -> None:
    def stop(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        job().write(tmp_path / "out", progress=stop)
    left = f"3 of 16 ranks are in {tmp_path / 'out.partial'}"
    assert caught.value.__notes__ == [f"{left}; --resume goes on from there"]


def test_resumed_set_is_that_of_one_run(tmp_path: Path) -> None:
    stop_after(5, tmp_path / "out")
    seen: list[int] = []
    job().write(tmp_path / "out", resume=True, progress=lambda done, _: seen.append(done))
    assert seen == list(range(6, 17))
    job().write(tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_run_without_resume_starts_over(tmp_path: Path) -> None:
    stop_after(5, tmp_path / "out")
    seen: list[int] = []
    job().write(tmp_path / "out", progress=lambda done, _: seen.append(done))
    assert seen == list(range(1, 17))


def test_resume_of_nothing_writes_everything(tmp_path: Path) -> None:
    assert job().write(tmp_path / "out", resume=True)["ranks"] == 16
    with pytest.raises(TraceError, match="exists already"):
        job().write(tmp_path / "out", resume=True)


def test_resume_twice(tmp_path: Path) -> None:
    stop_after(5, tmp_path / "out")
    stop_after(11, tmp_path / "out", resume=True)
    journal = tmp_path / "out.partial/unfinished.journal"
    assert journal.read_bytes().count(b"\n") == 13  # a blank one between the runs
    job().write(tmp_path / "out", resume=True)
    assert open_directory(tmp_path / "out").ranks == tuple(range(16))


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"batch": 16}, "batch was 8, now 16"),
        ({"seq": 64}, "seq was 32, now 64"),
        ({"tp": 4}, "mesh.atoms was"),
    ],
)
def test_other_inputs_are_not_resumed(tmp_path: Path, options: dict[str, int], difference: str) -> None:
    stop_after(5, tmp_path / "out")
    before = content(tmp_path / "out.partial")
    with pytest.raises(TraceError) as caught:
        job(**options).write(tmp_path / "out", resume=True)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'out.partial'} was begun with other inputs (")
    assert text.endswith("): resume with the same, or start over without --resume")
    assert difference in text
    assert "\n" not in text
    assert content(tmp_path / "out.partial") == before


def test_other_ranks_are_not_resumed(tmp_path: Path) -> None:
    stop_after(5, tmp_path / "out")
    with pytest.raises(TraceError, match=r'\(written was "all", now \[0, 1\]\)'):
        job().write(tmp_path / "out", ranks=[0, 1], resume=True)


@pytest.mark.parametrize("journal", [b"", b"\n", b"{", b"[]\n0 1 00000000\n", b"\xff" * 99])
def test_journal_that_says_nothing_is_started_over(tmp_path: Path, journal: bytes) -> None:
    stop_after(5, tmp_path / "out")
    (tmp_path / "out.partial/unfinished.journal").write_bytes(journal)
    seen: list[int] = []
    job().write(tmp_path / "out", resume=True, progress=lambda done, _: seen.append(done))
    assert seen == list(range(1, 17))


def test_torn_and_senseless_lines_count_for_nothing(tmp_path: Path) -> None:
    stop_after(5, tmp_path / "out")
    journal = tmp_path / "out.partial/unfinished.journal"
    head, *lines = journal.read_bytes().split(b"\n")
    size = len(job().rank(4))
    extra = [b"7 x y", b"99 1 00000000", b"-1 1 00000000", b"15 %d 00000000" % size, lines[3][:-3]]
    journal.write_bytes(b"\n".join([head, *lines[:3], *extra]))
    seen: list[int] = []
    job().write(tmp_path / "out", resume=True, progress=lambda done, _: seen.append(done))
    assert seen == list(range(4, 17))
    job().write(tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_nothing_partial_looks_complete_at_any_moment(tmp_path: Path) -> None:
    def look(*_: int) -> None:
        assert not (tmp_path / "out").exists()
        with pytest.raises(TraceError, match="is unfinished"):
            open_directory(tmp_path / "out.partial")

    job().write(tmp_path / "out", progress=look)
    assert open_directory(tmp_path / "out").world == 16


@pytest.mark.parametrize("name", ["groups.json", "manifest.json"])
def test_stop_at_the_very_end_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    opened = os.open

    def full(path: str, flags: int, mode: int = 0o777) -> int:
        if path.endswith(f"/{name}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr("stage.io.store.os.open", full)
        with pytest.raises(TraceError, match="16 of 16 ranks are in"):
            job().write(tmp_path / "out")
    with pytest.raises(TraceError, match="is unfinished"):
        open_directory(tmp_path / "out.partial")
    job().write(tmp_path / "out", resume=True)
    job().write(tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    monkeypatch.setattr("stage.io.store.os.write", lambda file, data: written(file, data[:1000]))
    job().write(tmp_path / "out")
    monkeypatch.undo()
    job().write(tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_need_of_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    class Usage:
        total, free = 1 << 30, 100_000

    monkeypatch.setattr("stage.io.target.shutil.disk_usage", lambda _: Usage)
    assert main(command(tmp_path / "new" / "out")[3:]) == 2
    text = capsys.readouterr().err
    need = sum(-(-len(job().rank(rank)) // 4096) * 4096 for rank in range(16)) + 8192
    assert text.startswith(
        f"stage: error: {tmp_path}/new/out needs {need / 2**20:.1f} MiB of disk, and {tmp_path} "
    )
    assert text.endswith("has 0.1 MiB free: make room, choose another disk, or write fewer ranks\n")
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_needs_no_more_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(15, tmp_path / "out")

    class Usage:
        total, free = 1 << 30, 200_000

    monkeypatch.setattr("stage.io.target.shutil.disk_usage", lambda _: Usage)
    job().write(tmp_path / "out", resume=True)


def test_set_that_a_function_makes_is_resumed(tmp_path: Path) -> None:
    made: list[int] = []

    def make(rank: int) -> bytes:
        made.append(rank)
        if rank == 3 and len(made) == 4:
            raise OSError(errno.EIO, "Input/output error")
        return b"%d" % rank

    with pytest.raises(TraceError, match=r"\(Input/output error\): 3 of 5 ranks are in"):
        write_directory(tmp_path / "out", 5, range(5), make, {}, {})
    write_directory(tmp_path / "out", 5, range(5), make, {}, {}, resume=True)
    assert made == [0, 1, 2, 3, 3, 4]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_folder_that_nobody_can_write_is_an_error(capsys: Capture) -> None:
    assert main(command("/proc/traces")[3:]) == 2
    text = capsys.readouterr().err
    assert text.startswith("stage: error: /proc/traces cannot be written (")
    assert text.endswith("), and nothing was: check space and rights\n")
