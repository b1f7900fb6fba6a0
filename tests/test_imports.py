"""The shape of the code: imports point one way, content keeps to itself, functions and modules stay small."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINE = sorted((ROOT / "stage").rglob("*.py"))
MODELS = sorted((ROOT / "models").glob("*.py"))
STRATEGIES = sorted((ROOT / "parallelism").glob("*.toml"))

# From the algebra up to the edge: a module imports from its own level and the levels before it.
LEVELS = (
    ("errors",),
    ("files",),
    ("symbols",),
    ("degrees",),
    ("expert_load", "load_option"),
    ("mesh",),
    ("layout",),
    ("step",),
    ("draft",),
    ("reshard",),
    ("tensor",),
    ("precision",),
    ("ops",),
    ("graph",),
    ("context", "hf", "modelfile", "recomputation"),
    ("strategy_keys",),
    ("strategy",),
    ("model",),
    ("blocks",),
    ("decoder",),
    ("passes",),
    ("counting",),
    ("counting",),
    ("pipeline",),
    ("trace",),
    ("cost",),
    ("explore",),
    ("catalog", "io"),
    ("sizes",),
    ("request",),
    ("describe",),
    ("traceset",),
    ("verification",),
    ("block_graphs",),
    ("synthesis",),
    ("memory",),
    ("estimate",),
    ("published",),
    ("summary",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
MODEL_IMPORTS = {
    "__future__",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "math",
    "typing",
    "stage",
}


def imported(path: Path) -> Iterator[str]:
    """Every module named in an import of the file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno}: a relative import"
            yield node.module or ""
            if node.module == "stage":
                yield from (f"stage.{alias.name}" for alias in node.names)


def part(path: Path) -> str:
    """The module or subpackage of the engine that a file belongs to."""
    return path.relative_to(ROOT / "stage").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in ENGINE if p != ROOT / "stage" / "__init__.py"], ids=str)
def test_imports_point_one_way(path: Path) -> None:
    own = part(path)
    assert own in LEVEL, f"{own} has no level in this test; say where in the order it belongs"
    for name in imported(path):
        _, _, rest = name.partition("stage.")
        target = rest.split(".")[0]
        if name.startswith("stage.") and target in LEVEL:
            assert LEVEL[target] <= LEVEL[own], f"{path}: imports {name}, which stands above {own}"


def test_only_the_command_line_imports_typer_and_rich() -> None:
    for path in ENGINE:
        names = {name.split(".")[0] for name in imported(path)}
        assert part(path) == "cli" or not names & {"typer", "rich"}, path


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_models_import_only_the_engine(path: Path) -> None:
    assert {name.split(".")[0] for name in imported(path)} <= MODEL_IMPORTS


def test_content_never_imports_or_names_another_file() -> None:
    stems = {path.stem for path in MODELS}
    for path in MODELS:
        for name in imported(path):
            assert name.split(".")[0] not in stems, f"{path}: imports {name}"


def test_the_engine_names_no_model_and_no_strategy() -> None:
    stems = {path.stem for path in (*MODELS, *STRATEGIES)}
    known = stems | {f"{stem}{end}" for stem in stems for end in (".py", ".toml")}
    for path in ENGINE:
        if part(path) == "published":
            continue  # tables of published runs have names of their own for models
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            assert text not in known, f"{path}: names {text!r}; content is found by the catalog"


@pytest.mark.parametrize("path", ENGINE, ids=str)
def test_no_module_grows_past_its_concept(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500, f"{path}: split it"
