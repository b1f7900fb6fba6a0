import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stage.cli import main
from stage.errors import StageError, TraceError
from tests.writing import command, content, job, start, wait_for_ranks


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of the workers that are started."""
    started: list[int] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)

    monkeypatch.setattr("stage.io.parallel.subprocess.Popen", Noted)
    return started


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def children(parent: int) -> list[int]:
    """The processes that a process has started, from /proc."""
    found = []
    for state in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = state.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(state.parent.name))
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_processes_writes_the_same_bytes(
    tmp_path: Path, workers: list[int], count: int
) -> None:
    traces = job(64, placement=[*range(1, 64), 0])
    seen: list[tuple[int, int]] = []
    traces.write(tmp_path / "one")
    assert workers == []
    counts = traces.write(
        tmp_path / "many", jobs=count, progress=lambda done, total: seen.append((done, total))
    )
    assert counts["ranks"] == 64
    assert seen == [(done, 64) for done in range(1, 65)]
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert len(set(workers)) == count
    assert all(map(gone, workers))


def test_more_processes_than_ranks(tmp_path: Path, workers: list[int]) -> None:
    job().write(tmp_path / "some", ranks=[3, 9], jobs=8)
    assert len(workers) == 2
    assert (tmp_path / "some/trace.9.et").read_bytes() == job().rank(9)


def test_no_ranks_need_no_process(tmp_path: Path, workers: list[int]) -> None:
    job().write(tmp_path / "none", ranks=[], jobs=2)
    assert workers == []


def test_processes_resume_what_one_has_begun(tmp_path: Path) -> None:
    def stop(done: int, _: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job().write(tmp_path / "out", progress=stop)
    seen: list[int] = []
    job().write(tmp_path / "out", resume=True, jobs=2, progress=lambda done, _: seen.append(done))
    assert seen == list(range(6, 17))
    job().write(tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_error_in_a_worker_is_the_error_of_the_run(tmp_path: Path, workers: list[int]) -> None:
    def obstruct(done: int, _: int) -> None:
        if done == 1:
            (tmp_path / "out.partial/trace.63.et").mkdir()

    with pytest.raises(TraceError) as caught:
        job(64).write(tmp_path / "out", jobs=2, progress=obstruct)
    assert str(caught.value).startswith(f"{tmp_path / 'out'} cannot be written (Is a directory): ")
    assert "\n" not in str(caught.value)
    assert all(map(gone, workers))


def test_worker_that_dies_is_one_line(tmp_path: Path, workers: list[int]) -> None:
    def kill(done: int, _: int) -> None:
        if done == 1:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(TraceError) as caught:
        job(512, layers=1).write(tmp_path / "out", jobs=2, progress=kill)
    assert str(caught.value).startswith("a writing process ended with status -9 (")
    assert "\n" not in str(caught.value)
    job(512, layers=1).write(tmp_path / "out", jobs=2, resume=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, signal_number: int) -> None:
    process = start(*command(tmp_path / "out", "--jobs", "2", gpus=8192, layers=1))
    wait_for_ranks(process, tmp_path / "out.partial", 1)
    pids = children(process.pid)
    assert len(pids) == 2
    process.send_signal(signal_number)
    _, errors = process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(gone, pids))
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_a_script_needs_no_guard_of_its_main_module(tmp_path: Path) -> None:
    script = (
        "import stage\n"
        f"stage.synthesize('llama3-8b', gpus=4, sizes={{'layers': 1}}).write({str(tmp_path / 'out')!r}, jobs=2)\n"
    )
    subprocess.run([sys.executable, "-"], input=script, text=True, check=True)
    assert len(list((tmp_path / "out").iterdir())) == 6


def test_jobs_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"^jobs = 0 is no number of processes: give 1 or more$"):
        job().write(tmp_path / "out", jobs=0)
    with pytest.raises(
        StageError, match=r"^2 jobs and the cluster tcp://x:1 are asked for: choose one of them$"
    ):
        job().write(tmp_path / "out", jobs=2, dask="tcp://x:1")
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_unpacked_by_processes(tmp_path: Path, workers: list[int]) -> None:
    job().write(tmp_path / "whole")
    job().write_bundle(tmp_path / "job.stage")
    line = ["unpack", str(tmp_path / "job.stage"), "--out", str(tmp_path / "out"), "--jobs", "2", "--json"]
    assert main(line) == 0
    assert len(workers) == 2
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("option", [["--jobs", "2"], ["--resume"], ["--dask", "tcp://x:1"]])
def test_a_bundle_is_written_by_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert main(command(tmp_path / "job.stage", "--format", "bundle", *option)[3:]) == 2
    expected = "--format bundle writes one small file: leave out --resume, --jobs and --dask"
    assert capsys.readouterr().err == f"stage: error: {expected}\n"
