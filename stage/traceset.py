"""A trace set: any rank's trace as bytes or as plain values, made when it is asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from stage.errors import StageError
from stage.io.bundle import bundle_classes, open_bundle, write_bundle
from stage.io.chakra import DirectorySource, open_directory
from stage.io.engine import Engine, in_process
from stage.io.parallel import in_processes
from stage.io.store import local_path
from stage.io.write import Content, write_set
from stage.trace.classes import RankClasses
from stage.trace.job import SCHEMA_VERSION, Job
from stage.trace.limits import ONE_AT_A_TIME, exceeded
from stage.trace.node import TraceNode
from stage.trace.partition import STAGES
from stage.trace.streams import several_streams
from stage.trace.totals import totals
from stage.trace.wire import read_trace

__all__ = ["TraceSet"]


class TraceSet:
    """The traces of all ranks of a job.

    `summaries` describes each class for the manifest, as `stage.trace.totals` does. `remake` is a small picklable
    function that makes the classes again in another process; without it only this one can write them.
    """

    def __init__(
        self,
        classes: RankClasses,
        description: Mapping[str, Any],
        summaries: Sequence[Mapping[str, Any]],
        remake: Callable[[], RankClasses] | None = None,
    ) -> None:
        self.classes = classes
        self.description = description
        self.summaries = summaries
        self.remake = remake
        self.world = classes.mesh.world
        self.ranks = range(self.world)

    @staticmethod
    def of(job: Job) -> "TraceSet":
        """The trace set of a job."""
        classes = job.classes()
        summaries = [totals(program, classes.groups.size) for program in job.programs]
        description = {**job.description, "schema": SCHEMA_VERSION}
        return TraceSet(classes, description, summaries, job.classes)

    @staticmethod
    def open(path: str | Path) -> "DirectorySource | TraceSet":
        """A trace set on disk, a folder or a bundle, with the same `rank`, `nodes`, `groups` and `manifest`."""
        file = local_path(path)
        if file is None or not file.is_file():
            return open_directory(path)
        bundle, again = open_bundle(file), partial(bundle_classes, file.absolute())
        return TraceSet(bundle.classes, bundle.description, bundle.summaries, again)

    def rank(self, rank: int) -> bytes:
        """The bytes of a rank's trace file."""
        return self.classes.rank(rank).tobytes()

    def nodes(self, rank: int) -> Iterator[TraceNode]:
        """The nodes of a rank's trace as plain values."""
        return read_trace(self.rank(rank))[1]

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """Process groups: name -> ranks in ring order."""
        return self.classes.groups.table()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Inputs, resolved sizes and mesh, counts, and for each class its totals and the digest of its bytes."""
        axes = self.classes.partition.axes
        return {
            **self.description,
            "ranks": self.world,
            "groups": self.classes.groups.count,
            **({} if set(axes) <= {STAGES} else {"class_axes": list(axes)}),
            "classes": [self._class_entry(number) for number in range(self.classes.count)],
        }

    @property
    def warnings(self) -> list[str]:
        """Limits of single consumers that the job exceeds, and what its streams risk in some."""
        tag = max((summary.get("largest_tag", 0) for summary in self.summaries), default=0)
        several = several_streams(self.description, self.summaries)
        limits = [text for _, text in exceeded(self.world, self.classes.groups.count, tag)]
        return [*limits, *([ONE_AT_A_TIME] if several else [])]

    def _class_entry(self, number: int) -> dict[str, Any]:
        size, sha256 = self.classes.digest(number)
        return {
            "class": number,
            "ranks": self.classes.ranks_per_class,
            "bytes": size,
            "sha256": sha256,
            **self.summaries[number],
        }

    def write(
        self,
        path: str | Path,
        ranks: Sequence[int] | None = None,
        *,
        force: bool = False,
        resume: bool = False,
        jobs: int = 1,
        dask: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, int]:
        """Write a directory of traces, complete or not at all; returns counts of ranks, classes, nodes and bytes.

        `path` is a path or a URL that fsspec knows. `ranks` chooses which are written (all by default). An existing
        directory is a `TraceError` without `force`. `resume` goes on with what an interrupted run left. `jobs` is a
        number of processes on this machine, `dask` the address of the scheduler of a cluster; the bytes are the same.
        """
        chosen = list(self.ranks) if ranks is None else list(dict.fromkeys(ranks))
        classes = [self.classes.of(rank) for rank in chosen]
        sizes = [self.classes.digest(number)[0] for number in range(self.classes.count)]
        manifest = {**self.manifest, "written": "all" if ranks is None else chosen}
        content = Content(
            self.world, chosen, lambda rank: sizes[self.classes.of(rank)], self.groups, manifest
        )
        engine = self._engine(jobs, dask)
        write_set(path, content, engine, force=force, resume=resume, progress=progress)
        return self._counts(classes)

    def write_bundle(
        self,
        path: str | Path,
        *,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, int]:
        """Write all ranks into one file; returns the counts of `write`, and the bytes of the file.

        A file of this name is a `TraceError` without `force`. `progress` counts classes.
        """
        size = write_bundle(path, self, force=force, progress=progress)
        return {**self._counts([self.classes.of(rank) for rank in self.ranks]), "bundle_bytes": size}

    def _counts(self, classes: Sequence[int]) -> dict[str, int]:
        """What ranks of these classes amount to."""
        return {
            "ranks": len(classes),
            "classes": len(set(classes)),
            "nodes": sum(self.summaries[c]["nodes"] for c in classes),
            "bytes": sum(self.classes.digest(c)[0] for c in classes),
        }

    def _engine(self, jobs: int, dask: str | None) -> Engine:
        """What writes the ranks: this process, several on this machine, or a cluster."""
        if dask is not None and jobs != 1:
            raise StageError(f"{jobs} jobs and the cluster {dask} are asked for: choose one of them")
        if dask is None and jobs == 1:
            return in_process(self.classes.each_bytes)
        if self.remake is None:
            raise StageError("this trace set can be made in one process only: write it with one job")
        if dask is None:
            return in_processes(jobs, self.remake)
        from stage.io.cluster import on_cluster  # noqa: PLC0415 - imports Dask, an extra

        return on_cluster(dask, self.remake)
