"""The engine of several processes on this machine.

Each worker is a fresh interpreter that gets the job (not its images), makes the ranks it is told, and answers with
their checksums. It reads its orders from a pipe, so it ends with the process that started it, however that ends; and
it is in a process group of its own, so an interrupt reaches it as the end of that pipe.
"""

import os
import pickle  # both ends are ours
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

from stage.errors import StageError, TraceError
from stage.io.engine import Engine, Written, cut, shareable, write_ranks
from stage.io.store import Store
from stage.trace.classes import RankClasses

__all__ = ["in_processes", "work"]

RANKS_AT_ONCE = 64
START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from stage.io.parallel import work; work()"
)


def in_processes(jobs: int, remake: Callable[[], RankClasses]) -> Engine:
    """Return the engine of `jobs` processes, each of which makes the classes by `remake`."""
    if jobs < 1:
        raise StageError(f"jobs = {jobs} is no number of processes: give 1 or more")

    def engine(store: Store, prefix: str, ranks: Sequence[int]) -> Iterator[Written]:
        shareable(store)
        chunks = deque(cut(ranks, RANKS_AT_ONCE, jobs))
        count = len(chunks)
        answers: SimpleQueue[list[Written] | Exception] = SimpleQueue()
        orders = pickle.dumps((remake, store, prefix), pickle.HIGHEST_PROTOCOL)
        with ExitStack() as stack:
            workers = [Worker(orders) for _ in range(min(jobs, count))]
            pool = stack.enter_context(ThreadPoolExecutor(max(1, len(workers))))
            for worker in workers:
                pool.submit(worker.drain, chunks, answers)
            stack.callback(chunks.clear)
            for _ in range(count):
                answer = answers.get()
                if isinstance(answer, Exception):
                    raise answer
                yield from answer

    return engine


class Worker:
    """A process that writes ranks, seen from the one that started it."""

    def __init__(self, orders: bytes) -> None:
        own_group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **own_group
        )
        self._orders = orders

    def drain(self, chunks: deque[Sequence[int]], answers: "SimpleQueue[list[Written] | Exception]") -> None:
        """Have chunks written until none is left, each answered by what was written or what went wrong."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            try:
                pickle.dump(sys.path, process.stdin)
                process.stdin.write(self._orders)
                while chunks:
                    pickle.dump(chunks.popleft(), process.stdin)
                    process.stdin.flush()
                    answers.put(pickle.load(process.stdout))  # noqa: S301 - written by our own worker
            except IndexError:  # another worker took the last chunk, or the writing was stopped
                return
            except Exception as err:  # noqa: BLE001 - whatever it is, an answer is waited for
                process.kill()
                ended = f"a writing process ended with status {process.wait()}"
                answers.put(TraceError(f"{ended} ({err!r}): try fewer jobs, as each needs memory"))


def work() -> None:
    """Write what is asked on standard input until it ends: the life of a worker."""
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    parent = os.getppid()
    remake, store, prefix = pickle.load(orders)  # noqa: S301 - written by the process that started this one
    classes = remake()
    while True:
        try:
            ranks = pickle.load(orders)  # noqa: S301
        except EOFError:
            return
        done: list[Written] = []
        failure: Exception | None = None
        try:
            for written in write_ranks(store, prefix, ranks, classes.each_bytes):
                if os.getppid() != parent:
                    return
                done.append(written)
        except Exception as err:  # noqa: BLE001 - it is raised again where the worker was started
            failure = err
        try:
            pickle.dump(failure or done, answers)
            answers.flush()
        except BrokenPipeError:  # who asked has gone
            os._exit(1)
