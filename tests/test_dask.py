"""A real cluster: a scheduler here and workers as processes of their own, one of which is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage.cli import main
from stage.errors import StageError, TraceError
from stage.io.parts import trace_name
from stage.io.store import FolderStore
from tests.writing import command, content, job

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    made = distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        silence_logs=50,
        local_directory=tmp_path_factory.mktemp("dask"),
    )
    with made:
        yield made


def test_cluster_writes_the_same_bytes(tmp_path: Path, cluster: Any) -> None:
    traces = job(64)
    seen: list[tuple[int, int]] = []
    counts = traces.write(
        tmp_path / "cluster",
        dask=cluster.scheduler_address,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert counts == traces.write(tmp_path / "here")
    assert seen == [(done, 64) for done in range(1, 65)]
    assert content(tmp_path / "cluster") == content(tmp_path / "here")


def test_worker_that_is_lost_costs_nothing(tmp_path: Path, cluster: Any) -> None:
    traces = job(2048, layers=1)
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if done > total // 4 and not killed:
            killed.append(next(iter(cluster.workers.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    traces.write(tmp_path / "cluster", dask=cluster.scheduler_address, progress=kill)
    assert killed
    traces.write(tmp_path / "here")
    assert content(tmp_path / "cluster") == content(tmp_path / "here")


def test_stopped_run_is_resumed_by_a_cluster(tmp_path: Path, cluster: Any) -> None:
    def stop(done: int, _: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job().write(tmp_path / "out", dask=cluster.scheduler_address, progress=stop)
    assert main(command(tmp_path / "out", "--resume", "--dask", cluster.scheduler_address)[3:]) == 0
    job().write(tmp_path / "here")
    assert content(tmp_path / "out") == content(tmp_path / "here")


def test_error_of_a_task_is_one_line(tmp_path: Path, cluster: Any) -> None:
    def obstruct(done: int, _: int) -> None:
        if done == 1:
            (tmp_path / "out.partial/trace.63.et").mkdir()

    with pytest.raises(TraceError) as caught:
        job(64).write(tmp_path / "out", dask=cluster.scheduler_address, progress=obstruct)
    assert str(caught.value).startswith(f"{tmp_path / 'out'} cannot be written (Is a directory): ")


def test_other_version_on_a_worker_is_refused(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage.__version__", "9.9")
    with pytest.raises(StageError) as caught:
        job().write(tmp_path / "out", dask=cluster.scheduler_address)
    assert str(caught.value).endswith(", the client 9.9: install the same on both")


def test_file_system_that_is_not_shared_is_named(tmp_path: Path) -> None:
    from stage.io.cluster import check_visible

    store = FolderStore(tmp_path)
    store.write({trace_name("trace", 3): b"x"})
    check_visible(store, "trace", [(3, 1, 0)])
    with pytest.raises(TraceError) as caught:
        check_visible(store, "trace", [(4, 1, 0)])
    assert str(caught.value) == (
        f"{tmp_path} does not show what a worker wrote there: "
        "give --out on a file system that all share, or a URL"
    )


def test_scheduler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage.io.cluster.PATIENCE", 1)
    for address in ("tcp://127.0.0.1:1", "nonsense://x:3"):
        with pytest.raises(StageError) as caught:
            job().write(tmp_path / "out", dask=address)
        assert str(caught.value).startswith(f"no Dask scheduler answers at {address} (")
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_client_that_cannot_connect_is_closed(tmp_path: Path) -> None:
    """Else it is closed at exit, which takes a minute and prints a traceback."""
    started = time.monotonic()
    line = command(tmp_path / "out", "--dask", "nonsense://x:3")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no Dask scheduler answers" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "address", ["foo", "tcp://host", "host:", "host:port", "host:0", "tcp://h:65536", "h h:1", ""]
)
def test_address_that_is_none_is_refused_at_once(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("stage.io.cluster.CleanClient")
    with pytest.raises(StageError) as caught:
        job().write(tmp_path / "out", dask=address)
    assert str(caught.value) == (
        f"{address!r} is no address of a Dask scheduler: give a host and a port, as in tcp://host:8786"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address", ["host:1", "tcp://10.0.0.1:8786", "tls://[::1]:65535", "inproc://10.0.0.1/7/1"]
)
def test_addresses_of_schedulers_pass(address: str) -> None:
    from stage.io.cluster import check_address

    check_address(address)


def test_dask_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "stage.io.cluster", raising=False)
    with pytest.raises(StageError) as caught:
        job().write(tmp_path / "out", dask="tcp://127.0.0.1:8786")
    assert str(caught.value).endswith("pip install 'stage-synth[dask]'")
    assert "\n" not in str(caught.value)
