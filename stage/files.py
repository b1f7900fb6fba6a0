"""Opening files that a user names, which may be anything."""

import errno
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_file"]


def open_file(path: Path) -> BinaryIO:
    """The file, to read its bytes; an `OSError` for a pipe or a device, which might never begin, or never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "is no file; give the path of one", str(path))
    return path.open("rb")
