"""Finding content: model files, strategy files and templates, shipped or the user's own.

The engine knows no content file by name. What a model file offers (its names, aliases and the Hugging Face
`model_type`s it reads) is read from its text without running it, so that listing is cheap and only the one
file that is used is imported. A user's own file is loaded exactly as a shipped one: by path, under a module
name of its own, and never through `sys.path`.
"""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Literal

from stage.errors import ModelError, StageError, StrategyError
from stage.files import open_file
from stage.hf import HFConfig, parse_config
from stage.modelfile import ModelFile, scan_model_file
from stage.strategy import Strategy, parse_strategy

__all__ = [
    "CatalogModel",
    "LoadedModel",
    "content",
    "default_strategy",
    "list_models",
    "list_strategies",
    "load_model",
    "load_strategy",
]

MAX_BYTES = 16 * 2**20  # far above any configuration, strategy or model file


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One shipped model: its published name, other names for it, and the file that defines it."""

    name: str
    aliases: tuple[str, ...]
    model_types: tuple[str, ...]
    title: str
    file: Path


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that was asked for: the module that builds it and the sizes it was asked for with."""

    name: str
    file: Path
    module: ModuleType
    sizes: Mapping[str, object]
    origin: str  # what the sizes were read from: a catalog name or the path of a config.json or .py file


def content(kind: Literal["models", "parallelism", "templates"]) -> Path:
    """The folder of one kind of content, in an installed wheel or in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_content" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise StageError(f"the folder {kind}/ that belongs to stage is not at {package}; install stage again")


def list_models() -> list[CatalogModel]:
    """Every model of the catalog, sorted by name, read without importing a model file."""
    found = [
        CatalogModel(
            name=name,
            aliases=tuple(sorted(alias for alias, target in file.aliases.items() if target == name)),
            model_types=file.model_types,
            title=file.title,
            file=file.path,
        )
        for file in _model_files()
        for name in file.variants
    ]
    return sorted(found, key=lambda model: _natural(model.name))


def list_strategies() -> list[Strategy]:
    """Every strategy of the catalog, sorted by name."""
    return [_read_strategy(path) for path in sorted(content("parallelism").glob("*.toml"))]


def load_model(text: str | Path) -> LoadedModel:
    """The model named by a catalog name or alias, a config.json (or a folder with one), or a .py file.

    A .py file with several variants is followed by the one that is meant, as in `my_model.py:70b`. A name
    of the catalog wins over a folder of that name; write `./name` for the folder.
    """
    name = str(text)
    if not name:
        raise ModelError("the model is empty; give a name of `stage models`, a config.json or a .py file")
    stem, separator, variant = name.rpartition(":")
    if name.endswith(".py"):
        return _load_own(Path(name), None)
    if separator and stem.endswith(".py"):
        return _load_own(Path(stem), variant)
    files = list(_model_files())
    for file in files:
        target = file.aliases.get(name, name)
        if target in file.variants:
            return _load_variant(file, target, origin=target)
    path = Path(name)
    if path.is_dir():
        return _load_config(path / "config.json", files)
    if path.exists() or path.suffix == ".json" or len(path.parts) > 1:
        return _load_config(path, files)
    known = [known for file in files for known in (*file.variants, *file.aliases)]
    raise ModelError(
        f"unknown model '{name}'{_near(name, known)}; `stage models` lists the known ones, "
        "and the path of a Hugging Face config.json or of a .py file works as well"
    )


def load_strategy(text: str | Path) -> Strategy:
    """The strategy named by a catalog name, or in the TOML file of that path."""
    path = Path(text)
    known = {file.stem: file for file in sorted(content("parallelism").glob("*.toml"))}
    if str(text) in known:
        return _read_strategy(known[str(text)])
    if path.suffix == ".toml" or len(path.parts) > 1:
        return _read_strategy(path)
    raise StrategyError(
        f"unknown strategy '{text}'{_near(str(text), list(known))}; known: {', '.join(known)}; "
        "the path of a .toml file works as well"
    )


def default_strategy(architecture: Literal["dense", "moe"]) -> Strategy:
    """The strategy that says it is the default for models of this architecture."""
    for strategy in list_strategies():
        if architecture in strategy.default_for:
            return strategy
    raise StrategyError(f"no strategy of the catalog is for '{architecture}' models by default; name one")


def _model_files() -> Iterator[ModelFile]:
    for path in sorted(content("models").glob("*.py")):
        yield scan_model_file(_read(path, ModelError), path)


def _load_own(path: Path, variant: str | None) -> LoadedModel:
    file = scan_model_file(_read(path, ModelError), path)
    if variant is None and len(file.variants) > 1:
        raise ModelError(
            f"{path}: has {len(file.variants)} variants; say which one is meant, "
            f"as in {path}:{file.variants[0]} (known: {', '.join(file.variants)})"
        )
    if variant is None:
        return _load_variant(file, file.variants[0] if file.variants else path.stem, origin=str(path))
    variant = file.aliases.get(variant, variant)
    if variant not in file.variants:
        hint = f"{_near(variant, file.variants)}; known: {', '.join(file.variants) or 'none'}"
        raise ModelError(f"{path}: unknown variant '{variant}'{hint}")
    return _load_variant(file, variant, origin=f"{path}:{variant}")


def _load_variant(file: ModelFile, name: str, origin: str) -> LoadedModel:
    module = _import_file(file.path)
    if not callable(getattr(module, "model", None)):
        raise ModelError(f"{file.path}: defines no function model(name, sizes), so it is not a model file")
    variants: Mapping[str, Mapping[str, object]] = getattr(module, "VARIANTS", {})
    return LoadedModel(name, file.path, module, dict(variants.get(name, {})), origin)


def _load_config(path: Path, files: list[ModelFile]) -> LoadedModel:
    config = parse_config(_read(path, ModelError), str(path))
    kind = config.require("model_type", str)
    file = next((file for file in files if kind in file.model_types), None)
    if file is None:
        known = sorted({known for file in files for known in file.model_types})
        raise ModelError(
            f"{path}: model_type '{kind}' is not one that a model file reads{_near(kind, known)}; "
            f"known: {', '.join(known)}; a .py file can describe any other model"
        )
    module = _import_file(file.path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return LoadedModel(name or kind, file.path, module, _sizes(module, config, file.path), str(path))


def _sizes(module: ModuleType, config: HFConfig, file: Path) -> dict[str, object]:
    try:
        return dict(module.from_hf(config))
    except StageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as err:
        raise ModelError(
            f"{config.origin}: {file.name} cannot read this configuration: {type(err).__name__}: {_line(err)}"
        ) from err


def _import_file(path: Path) -> ModuleType:
    source = _read(path, ModelError)
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + source).hexdigest()[:16]
    name = f"stage_model_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:
        del sys.modules[name]
        if isinstance(err, StageError):
            raise
        what = f"{type(err).__name__}: {_line(err)}{_where(err, path)}"
        raise ModelError(f"{path}: cannot be imported: {what}") from err
    return module


def _where(err: BaseException, path: Path) -> str:
    lines = []
    trace = err.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""


def _read_strategy(path: Path) -> Strategy:
    data = _read(path, StrategyError)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise StrategyError(f"{path}: not a text file in UTF-8: {err.reason} at byte {err.start}") from err
    return parse_strategy(text, path.stem, str(path))


def _read(path: Path, error: type[StageError]) -> bytes:
    try:
        with open_file(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as err:
        raise error(f"{path}: cannot be read: {err.strerror or err}") from err
    if len(data) > MAX_BYTES:
        raise error(f"{path}: is larger than {MAX_BYTES // 2**20} MiB, which no file of this kind is")
    return data


def _near(name: str, known: list[str] | tuple[str, ...]) -> str:
    near = get_close_matches(name, known, n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _line(err: BaseException) -> str:
    return " ".join(str(err).split())


def _natural(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"([0-9]+)", name)  # 7b comes before 13b
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
