"""Reading the small languages of options; each complaint names the option, what was found and the form."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from stage.errors import MeshError, ModelError, StageError, StrategyError
from stage.files import open_file

__all__ = ["parse_ranks", "parse_reshard", "parse_sizes", "parse_stage_layers", "read_placement"]

MOST = 2**22  # stages or ranks that one option may list; far above any machine, far below all memory


def parse_stage_layers(text: str) -> list[int]:
    """The layers of each pipeline stage, first to last; `AxN` is N stages of A layers.

    >>> parse_stage_layers("7,8x3,7")
    [7, 8, 8, 8, 7]
    """
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:x([0-9]{1,9}))?\s*", part)
        count = int(match[2] or 1) if match else 0
        if match is None or count < 1 or len(layers) + count > MOST:
            raise StrategyError(
                f"--stage-layers '{_short(text)}': '{_short(part)}' is not LAYERS or LAYERSxSTAGES; "
                "write the layers of each stage in order, as in 7,8x14,7"
            )
        layers += [int(match[1])] * count
    return layers


def parse_ranks(text: str) -> list[int]:
    """The ranks in a list of numbers and inclusive ranges, ascending, each once.

    >>> parse_ranks("64,0-3,2")
    [0, 1, 2, 3, 64]
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if match is None or last < first:
            raise StageError(
                f"--ranks '{_short(text)}': '{_short(part)}' is not RANK or FIRST-LAST; "
                "write ranks and ascending ranges, as in 0-7,64"
            )
        if last - first >= MOST or len(ranks) > MOST:
            raise StageError(
                f"--ranks '{_short(text)}': lists more than {MOST:,} ranks; write fewer at a time"
            )
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def parse_reshard(text: str) -> bool | int:
    """Whether, or over how many ranks, parameters are sharded again after forward.

    >>> parse_reshard("false"), parse_reshard("8")
    (False, 8)
    """
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise StrategyError(
            f"--reshard-after-forward '{_short(text)}' is not true, false or a number of ranks; write one of them"
        )
    return int(text)


def parse_sizes(texts: Iterable[str]) -> dict[str, int]:
    """The sizes in texts such as `d_model=20480,layers=120`.

    >>> parse_sizes(["d_model=20480,layers=120", "seq=8_192"])
    {'d_model': 20480, 'layers': 120, 'seq': 8192}
    """
    sizes: dict[str, int] = {}
    for text in texts:
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
                raise ModelError(
                    f"--set '{_short(text)}': '{_short(part)}' is not NAME=NUMBER; "
                    "write the sizes to change, as in d_model=20480,layers=120"
                )
            if not re.fullmatch(r"[0-9][0-9_]{0,17}", value):
                raise ModelError(
                    f"--set '{_short(text)}': size '{name}' is '{_short(value)}'; "
                    "write a whole number that is not negative"
                )
            if name in sizes:
                raise ModelError(f"--set: size '{name}' is given twice; give it once")
            sizes[name] = int(value.replace("_", ""))
    return sizes


def read_placement(path: Path) -> list[int]:
    """The ranks in a file, where the n-th number is the rank that takes place n of the mesh (from 0).

    Numbers are separated by white space or commas; `#` begins a comment. Each of 0..n-1 must appear once.
    """
    try:
        with open_file(path) as file:
            lines = file.read().decode().splitlines()
    except UnicodeDecodeError as err:
        raise MeshError(f"--placement {path}: not a text file in UTF-8 (byte {err.start})") from err
    except OSError as err:
        raise MeshError(f"--placement {path}: cannot be read: {err.strerror or err}") from err
    ranks: list[int] = []
    for number, line in enumerate(lines, start=1):
        for word in line.partition("#")[0].replace(",", " ").split():
            if not re.fullmatch(r"[0-9]{1,9}", word):
                raise MeshError(
                    f"--placement {path}: line {number}: '{_short(word)}' is not a rank; write 0, 1, ..."
                )
            ranks.append(int(word))
    _check_permutation(ranks, path)
    return ranks


def _check_permutation(ranks: Sequence[int], path: Path) -> None:
    if not ranks:
        raise MeshError(f"--placement {path}: holds no ranks; write one for each place of the mesh")
    seen: set[int] = set()
    for rank in ranks:
        problem = (
            "appears twice" if rank in seen else f"is not below {len(ranks)}" if rank >= len(ranks) else None
        )
        if problem:
            raise MeshError(
                f"--placement {path}: rank {rank} {problem}; "
                f"the file holds {len(ranks)} ranks, so each of 0 to {len(ranks) - 1} must appear once"
            )
        seen.add(rank)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
