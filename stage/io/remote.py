"""The prefix of an object store, or of any file system that fsspec knows, as a store of named files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec

from stage.errors import TraceError
from stage.io.store import Data

__all__ = ["RemoteStore"]

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
BATCH = 32 << 20


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """The files under a URL; settings and credentials are those of fsspec's own configuration."""

    url: str
    batch: int = BATCH

    def __post_init__(self) -> None:
        self._connect()

    @property
    def private(self) -> bool:
        """Whether the files can be seen from this process only."""
        return self.url.startswith("memory:")

    def where(self, name: str = "") -> str:
        """Return the URL of a file, or of the store, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def names(self) -> list[str]:
        """Return the names of all entries; a prefix that does not exist has none."""
        system, root = self._connect()
        with _system_errors():
            system.invalidate_cache()
            try:
                found = system.ls(root, detail=False)
            except FileNotFoundError:
                return []
        return [name for name in (path.rstrip("/").rpartition("/")[2] for path in found) if name]

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        system, root = self._connect()
        with _system_errors():
            return bool(system.exists(f"{root}/{name}"))

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        system, root = self._connect()
        with _system_errors():
            data: bytes = system.cat_file(f"{root}/{name}")
        return data

    def write(self, files: Mapping[str, Data]) -> None:
        """Write files, at the same time where the store can."""
        system, root = self._connect()
        with _system_errors():
            system.makedirs(root, exist_ok=True)
            system.pipe({f"{root}/{name}": bytes(data) for name, data in files.items()})

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file, which objects can only do by being written again."""
        before = self.read(name) if self.has(name) else b""
        self.write({name: before + data})

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""
        system, root = self._connect()
        with _system_errors():
            if names:
                system.rm([f"{root}/{name}" for name in names])

    def _connect(self) -> tuple[Any, str]:
        """The file system, of which fsspec keeps one for equal settings, and the path in it."""
        protocol = self.url.partition(":")[0]
        try:
            system, root = fsspec.core.url_to_fs(self.url)
        except ImportError as err:
            extra = EXTRAS.get(protocol)
            how = f"pip install 'stage-synth[{extra}]'" if extra else "install the package that it names"
            raise TraceError(
                f"{self.url}: {protocol}:// needs a package that is not here ({err}): {how}"
            ) from err
        except ValueError as err:
            raise TraceError(
                f"{self.url} cannot be used ({err}): give a path or a URL that fsspec knows, as s3://bucket/set"
            ) from err
        if not root.strip("/"):
            raise TraceError(f"{self.url} names no set: give a name in it, as {protocol}://bucket/traces")
        return system, root.rstrip("/")


@contextmanager
def _system_errors() -> Iterator[None]:
    """Turn what a store's own library raises into errors of the system, which callers expect."""
    try:
        yield
    except OSError:
        raise
    except Exception as err:  # every store has classes of its own
        raise OSError(f"{type(err).__name__}: {err}") from err
