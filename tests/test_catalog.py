"""The catalog: shipped names, a user's own files, and the text of every complaint."""

import json
import sys
from pathlib import Path

import pytest

from stage import catalog
from stage.errors import ModelError, StageError

ALPHA = '''"""Alpha: a family for these tests."""
from collections.abc import Mapping
import stage
VARIANTS: dict[str, dict[str, object]] = {"alpha-2b": {"layers": 2}, "alpha-10b": {"layers": 10}}
ALIASES = {"alpha-small": "alpha-2b"}
MODEL_TYPES = ("alpha", "alpha_next")
def model(name: str, sizes: Mapping[str, object]) -> None: ...
def from_hf(config: Mapping[str, object]) -> dict[str, object]:
    return {"layers": config["num_hidden_layers"] // 1}
'''


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of model files that stands in for the shipped one."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "alpha.py").write_text(ALPHA)
    (folder / "beta.py").write_text('"""Beta."""\nVARIANTS = {"beta-1b": dict(layers=1)}\nmodel = print\n')
    monkeypatch.setattr(catalog, "content", lambda _kind: folder)
    return folder


def complaint(text: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        catalog.load_model(text)
    return str(caught.value)


def test_content_is_found_beside_the_package() -> None:
    assert (catalog.content("parallelism") / "fsdp.toml").is_file()


def test_missing_content_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "__file__", str(tmp_path / "stage" / "catalog.py"))
    with pytest.raises(
        StageError, match=r"^the folder models/ that belongs to stage is not at .*; install stage again$"
    ):
        catalog.content("models")


def test_listing_sorts_sizes_as_numbers_and_imports_nothing(shelf: Path) -> None:
    before = set(sys.modules)
    models = catalog.list_models()
    assert [model.name for model in models] == ["alpha-2b", "alpha-10b", "beta-1b"]
    assert (models[0].aliases, models[0].model_types) == (("alpha-small",), ("alpha", "alpha_next"))
    assert models[0].title == "Alpha: a family for these tests."
    assert models[0].file == shelf / "alpha.py"
    assert set(sys.modules) == before


@pytest.mark.usefixtures("shelf")
def test_names_and_aliases_load_the_variant() -> None:
    model = catalog.load_model("alpha-small")
    assert (model.name, model.sizes, model.origin) == ("alpha-2b", {"layers": 2}, "alpha-2b")
    assert catalog.load_model("alpha-10b").module is model.module
    assert catalog.load_model("beta-1b").sizes == {"layers": 1}


@pytest.mark.usefixtures("shelf")
def test_unknown_name_offers_close_ones_and_the_list() -> None:
    assert complaint("alpha-3b") == (
        "unknown model 'alpha-3b' (did you mean alpha-2b or alpha-10b or alpha-small?); `stage models` lists the known "
        "ones, and the path of a Hugging Face config.json or of a .py file works as well"
    )
    assert "did you mean" not in complaint("zzz")


@pytest.mark.usefixtures("shelf")
def test_config_file_or_its_folder_is_read_by_model_type(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "alpha_next", "num_hidden_layers": 7}))
    for text in (folder, folder / "config.json", str(folder)):
        model = catalog.load_model(text)
        assert (model.name, model.sizes) == ("some-model", {"layers": 7})
        assert model.origin == str(folder / "config.json")


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "key 'model_type' is missing; the file must give a text there"),
        (
            '{"model_type": "alpa"}',
            "model_type 'alpa' is not one that a model file reads (did you mean alpha?); known: alpha, alpha_next; "
            "a .py file can describe any other model",
        ),
        ('{"model_type": "alpha"}', "key 'num_hidden_layers' is missing"),
        (
            '{"model_type": "alpha", "num_hidden_layers": "3"}',
            "alpha.py cannot read this configuration: TypeError: unsupported operand type(s) for //: 'str' and 'int'",
        ),
        ("{", "not valid JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
    ],
)
def test_wrong_configurations_are_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    assert complaint(path) == f"{path}: {problem}"


@pytest.mark.usefixtures("shelf")
def test_unreadable_paths_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "no.json"
    assert complaint(missing) == f"{missing}: cannot be read: No such file or directory"
    assert complaint(tmp_path) == f"{tmp_path}/config.json: cannot be read: No such file or directory"
    assert complaint("no_such_model.py") == "no_such_model.py: cannot be read: No such file or directory"
    monkeypatch.setattr(catalog, "MAX_BYTES", 2**20)
    (tmp_path / "big.json").write_bytes(b" " * (2**20 + 1))
    assert complaint(tmp_path / "big.json").endswith(
        "big.json: is larger than 1 MiB, which no file of this kind is"
    )


def test_own_file_is_loaded_by_path_alone(tmp_path: Path) -> None:
    path = tmp_path / "json.py"  # a name that must not shadow anything
    path.write_text('VARIANTS = {"mine": {"layers": 3}}\nmodel = print\n')
    before = list(sys.path)
    model = catalog.load_model(path)
    assert (model.name, model.sizes, model.origin) == ("mine", {"layers": 3}, str(path))
    assert sys.path == before
    assert sys.modules["json"] is json
    path.write_text('VARIANTS = {"mine": {"layers": 4}}\nmodel = print\n')
    assert catalog.load_model(path).sizes == {"layers": 4}


def test_own_file_without_variants_takes_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.py"
    path.write_text("model = print\n")
    model = catalog.load_model(str(path))
    assert (model.name, model.sizes) == ("tiny", {})


def test_own_file_with_several_variants_is_asked_which(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(ALPHA)
    assert catalog.load_model(f"{path}:alpha-10b").sizes == {"layers": 10}
    assert catalog.load_model(f"{path}:alpha-small").name == "alpha-2b"
    assert complaint(path) == (
        f"{path}: has 2 variants; say which one is meant, as in {path}:alpha-2b (known: alpha-2b, alpha-10b)"
    )
    assert complaint(f"{path}:alpha-3b") == (
        f"{path}: unknown variant 'alpha-3b' (did you mean alpha-2b or alpha-10b?); known: alpha-2b, alpha-10b"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "defines no function model(name, sizes), so it is not a model file"),
        ("x = (", "not valid Python: '(' was never closed at line 1"),
        (
            "import no_such_module_here",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here' (line 1)",
        ),
        ("\n1 / 0", "cannot be imported: ZeroDivisionError: division by zero (line 2)"),
        (
            "VARIANTS = dict(a={})",
            'VARIANTS at line 1 must be written as {"name": sizes, ...} with the names as plain texts: '
            "names are read without running the file",
        ),
        (
            "VARIANTS = {'a': {}}\nALIASES = {'b': 1}",
            'ALIASES at line 2 must be written as {"alias": "name", ...}: names are read without running the file',
        ),
        (
            "MODEL_TYPES = ['a']",
            'MODEL_TYPES at line 1 must be written as ("model_type", ...): names are read without running the file',
        ),
    ],
)
def test_faulty_own_files_are_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    assert complaint(path) == f"{path}: {problem}"


def test_every_shipped_model_loads_by_each_of_its_names() -> None:
    for listed in catalog.list_models():
        for name in (listed.name, *listed.aliases):
            assert catalog.load_model(name).name == listed.name
