"""The engine of a Dask cluster: ranks in chunks, each written by whichever worker takes it.

What travels is the job as programs (a megabyte at most as a rule), never a rank's bytes; a worker makes the images of
the classes once. A chunk writes the same files however often it runs, so one whose worker is lost simply runs again.
"""

import pickle  # both ends are ours
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import stage
from stage.errors import StageError, TraceError
from stage.io.engine import Engine, Written, cut, shareable, write_ranks
from stage.io.parts import trace_name
from stage.io.store import Store
from stage.trace.classes import RankClasses

try:
    from distributed import Client, Future, as_completed
except ImportError as err:
    raise StageError(f"a cluster needs Dask ({err}): pip install 'stage-synth[dask]'") from err

__all__ = ["on_cluster"]

RANKS_AT_ONCE = 64
PATIENCE = 30
RETRIES = 2
ADDRESS = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})/?")


def on_cluster(address: str, remake: Callable[[], RankClasses]) -> Engine:
    """Return the engine of the cluster whose scheduler is at `address`; workers make the classes by `remake`."""
    check_address(address)

    def engine(store: Store, prefix: str, ranks: Sequence[int]) -> Iterator[Written]:
        shareable(store)
        recipe = pickle.dumps((stage.__version__, remake), pickle.HIGHEST_PROTOCOL)
        with connected(address) as client:
            # The recipe is the result of a task, so that it is computed again if the worker that has it is lost.
            kept = client.submit(bytes, recipe)
            chunks = cut(ranks, RANKS_AT_ONCE, len(client.scheduler_info()["workers"]))
            tasks = {
                client.submit(write_chunk, kept, store, prefix, chunk, retries=RETRIES, pure=False)
                for chunk in chunks
            }
            try:
                for task in as_completed(list(tasks), loop=client.loop):
                    written = answer(task, address)
                    check_visible(store, prefix, written)
                    yield from written
                    tasks.discard(task)
                    task.release()  # or it would run again if its worker were lost later
            finally:
                client.cancel(list(tasks))

    return engine


def write_chunk(recipe: bytes, store: Store, prefix: str, ranks: Sequence[int]) -> list[Written]:
    """Write some ranks: a task of the cluster."""
    return list(write_ranks(store, prefix, ranks, classes_of(recipe).each_bytes))


@lru_cache(maxsize=1)
def classes_of(recipe: bytes) -> RankClasses:
    """The classes of a job, which a worker makes once."""
    version, remake = pickle.loads(recipe)  # noqa: S301 - from a client that may run anything here anyway
    if version != stage.__version__:
        raise StageError(
            f"the worker has stage {stage.__version__}, the client {version}: install the same on both"
        )
    classes: RankClasses = remake()
    return classes


def check_address(address: str) -> None:
    """Raise where an address can not be one of a scheduler, which Dask would try for long.

    >>> check_address("tcp://10.0.0.1:8786")
    """
    if address.startswith("inproc://"):
        return
    match = ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise StageError(
            f"{address!r} is no address of a Dask scheduler: give a host and a port, as in tcp://host:8786"
        )


class CleanClient(Client):  # type: ignore[misc]  # Dask has no types
    """A client that closes if it can not connect; Dask leaves it half open but for an `OSError`, and hangs at exit."""

    async def _start(self, *args: Any, **options: Any) -> Any:
        try:
            return await super()._start(*args, **options)
        except Exception:
            await self._close(fast=True)
            raise


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client of the scheduler, with at least one worker."""
    try:
        client = CleanClient(address, timeout=PATIENCE, set_as_default=False)
    except Exception as err:  # what is no scheduler may answer anything
        why = " ".join(str(err).split()) or type(err).__name__
        raise StageError(
            f"no Dask scheduler answers at {address} ({why}): start one, or check the address"
        ) from err
    with client:
        try:
            client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError as err:
            raise StageError(
                f"the Dask scheduler at {address} has no worker after {PATIENCE} s: start some"
            ) from err
        yield client


def answer(task: "Future[list[Written]]", address: str) -> list[Written]:
    """What a task has written; its error in one line."""
    try:
        written: list[Written] = task.result()
    except (StageError, FileNotFoundError) as err:
        if isinstance(err, StageError):
            raise
        raise TraceError(
            f"a worker of {address} has no {err.filename}: give --out on a file system that all share, or a URL"
        ) from err
    except OSError:
        raise
    except Exception as err:
        raise TraceError(f"a task of the cluster {address} failed ({type(err).__name__}: {err})") from err
    return written


def check_visible(store: Store, prefix: str, written: Sequence[Written]) -> None:
    """Raise where what a worker wrote is not seen from here."""
    for rank, _, _ in written[:1]:
        if not store.has(trace_name(prefix, rank)):
            raise TraceError(
                f"{store.where()} does not show what a worker wrote there: "
                "give --out on a file system that all share, or a URL"
            )
