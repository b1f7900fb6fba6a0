"""Cost models by name: the shipped `roofline`, and what installed packages add by entry points `stage.cost_models`.

An entry point names a callable `make(system, argument)` that returns a `CostModel` (`stage.cost.work`). It is found by
its name; a path is given to the model whose entry point is named like its suffix (`.parquet`, `.csv`), with the path as
the argument, None otherwise. A package declares it so:

    [project.entry-points."stage.cost_models"]
    mine = "my_package:make"
"""

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from stage.cost.system import System
from stage.cost.work import CostModel
from stage.errors import StageError

__all__ = ["GROUP", "list_cost_models", "load_cost_model"]

GROUP = "stage.cost_models"

SHIPPED = {"roofline": "stage.cost.roofline:make"}
"""The entry points of this package, which a checkout has whether or not it is installed."""


def list_cost_models() -> list[str]:
    """Return the names of the models that are installed, sorted; those of suffixes begin with a dot."""
    return sorted(_found())


def load_cost_model(name: str | Path, system: System) -> CostModel:
    """Return the model of this name, or the one that reads files of a path's suffix, for a system."""
    found, path = _found(), Path(name)
    if str(name) in found:
        return _made(found[str(name)], system, None)
    if path.suffix not in found:
        names = ", ".join(one for one in sorted(found) if not one.startswith("."))
        files = "".join(f", or a {one} file" for one in sorted(found) if one.startswith("."))
        raise StageError(f"there is no cost model {str(name)!r}: take one of {names}{files}")
    if not path.is_file():
        raise StageError(f"the cost model {name} is no file: check the path")
    return _made(found[path.suffix], system, path)


def _found() -> dict[str, EntryPoint]:
    """The entry points by name; two packages with one name are told apart by neither, so that is an error."""
    found = {name: EntryPoint(name, value, GROUP) for name, value in SHIPPED.items()}
    for point in entry_points(group=GROUP):
        before = found.setdefault(point.name, point)
        if before.value != point.value:
            raise StageError(
                f"two packages have a cost model {point.name!r}, {before.value} and {point.value}: uninstall one"
            )
    return found


def _made(point: EntryPoint, system: System, argument: Path | None) -> CostModel:
    """What an entry point makes, if it can price."""
    try:
        make = point.load()
    except (ImportError, AttributeError) as err:
        line = " ".join(str(err).split())
        raise StageError(
            f"the cost model {point.name!r} ({point.value}) can not be loaded ({line}): reinstall it"
        ) from err
    model: CostModel = make(system, argument)
    for method in ("kernels", "exchanges"):
        if not callable(getattr(model, method, None)):
            raise StageError(f"the cost model {point.name!r} ({point.value}) has no method {method}: add it")
    return model
