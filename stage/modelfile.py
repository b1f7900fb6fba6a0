"""What a model file says about itself, read from its text without running it.

A model file assigns, at its top level and as plain literals, `VARIANTS` (name -> sizes), and where it has
them `ALIASES` (alias -> name) and `MODEL_TYPES` (the `model_type`s of Hugging Face that its `from_hf` reads).
The values of `VARIANTS` may be any expression: only its keys are read here.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

from stage.errors import ModelError

__all__ = ["ModelFile", "scan_model_file"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The names that a model file offers."""

    path: Path
    title: str
    variants: tuple[str, ...]
    aliases: dict[str, str]
    model_types: tuple[str, ...]


def scan_model_file(source: bytes, path: Path) -> ModelFile:
    """The names in the text of a model file; a `ModelError` names the file and the line at fault.

    >>> scan_model_file(b'VARIANTS = {"a-1b": dict(layers=2)}', Path("a.py")).variants
    ('a-1b',)
    """
    try:
        tree = ast.parse(source, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        line = f" at line {err.lineno}" if isinstance(err, SyntaxError) and err.lineno else ""
        message = err.msg if isinstance(err, SyntaxError) else str(err)
        raise ModelError(f"{path}: not valid Python: {message}{line}") from err
    values = dict(_assignments(tree))
    title = (ast.get_docstring(tree) or "").split("\n\n")[0]
    return ModelFile(
        path=path,
        title=" ".join(title.split()),
        variants=_variants(values.get("VARIANTS"), path),
        aliases=_aliases(values.get("ALIASES"), path),
        model_types=_model_types(values.get("MODEL_TYPES"), path),
    )


def _assignments(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    found = []
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        found += [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]
    return found


def _variants(node: ast.expr | None, path: Path) -> tuple[str, ...]:
    if node is None:
        return ()
    keys = node.keys if isinstance(node, ast.Dict) else [None]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    if len(names) < len(keys):
        raise _error(path, node, "VARIANTS", '{"name": sizes, ...} with the names as plain texts')
    return tuple(names)


def _aliases(node: ast.expr | None, path: Path) -> dict[str, str]:
    value = {} if node is None else _literal(node)
    texts = [*value, *value.values()] if isinstance(value, dict) else [None]
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in texts):
        raise _error(path, node, "ALIASES", '{"alias": "name", ...}')
    return value


def _model_types(node: ast.expr | None, path: Path) -> tuple[str, ...]:
    value = () if node is None else _literal(node)
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise _error(path, node, "MODEL_TYPES", '("model_type", ...)')
    return value


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _error(path: Path, node: ast.expr | None, name: str, form: str) -> ModelError:
    assert node is not None  # what is not assigned is read as empty, which is well formed
    what = f"{name} at line {node.lineno} must be written as {form}"
    return ModelError(f"{path}: {what}: names are read without running the file")
