"""Cost models by name, and one that an installed package adds."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stage.cost.plugins import GROUP, SHIPPED, list_cost_models, load_cost_model
from stage.cost.roofline import Roofline
from stage.cost.system_file import load_system
from stage.cost.work import Exchange, Kernel
from stage.errors import StageError

SYSTEM = load_system("h100")

MODEL = '''
import json

import numpy as np


class Flat:
    """Every kernel at half of the peak of its dtype, every byte of an exchange at the bandwidth of the first tier."""

    def __init__(self, system, share):
        self.system, self.share = system, share

    def kernels(self, kernels):
        return np.array([k.flops / (self.share * self.system.peak(k.dtype)) for k in kernels])

    def exchanges(self, exchanges):
        return np.array([e.bytes / self.system.tiers[0].bandwidth for e in exchanges])


def make(system, argument):
    share = 0.5 if argument is None else json.loads(argument.read_text())["share"]
    return Flat(system, share)


def half_made(system, argument):
    return object()
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Install packages as pip does: a module, and a folder of metadata that has its entry points."""
    points: list[str] = []

    def write() -> None:
        for number, text in enumerate(points):
            (tmp_path / f"flat_cost_{number}.py").write_text(MODEL, encoding="utf-8")
            info = tmp_path / f"flat_cost_{number}-1.0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: flat-cost-{number}\nVersion: 1.0\n", encoding="utf-8"
            )
            (info / "entry_points.txt").write_text(f"[{GROUP}]\n{text}\n", encoding="utf-8")

    class Points(list[str]):
        def append(self, item: str) -> None:
            points.append(item)
            write()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield Points()
    for name in [name for name in sys.modules if name.startswith("flat_cost_")]:
        del sys.modules[name]


def message(name: str | Path) -> str:
    with pytest.raises(StageError) as caught:
        load_cost_model(name, SYSTEM)
    return str(caught.value)


def test_roofline_is_shipped() -> None:
    assert "roofline" in list_cost_models()
    model = load_cost_model("roofline", SYSTEM)
    assert isinstance(model, Roofline)
    assert model.system is SYSTEM


def test_shipped_models_are_the_declared_ones() -> None:
    declared = Path(__file__).resolve().parent.parent / "pyproject.toml"
    text = declared.read_text(encoding="utf-8").partition(f'[project.entry-points."{GROUP}"]\n')[2]
    lines = text.partition("\n\n")[0].splitlines()
    assert dict(line.replace('"', "").split(" = ") for line in lines) == SHIPPED


def test_package_of_somebody_else(install: list[str]) -> None:
    install.append("flat = flat_cost_0:make")
    model = load_cost_model("flat", SYSTEM)
    kernel = Kernel("contract", "bf16", round(989.4e12), 1, "", matmul=True)
    assert model.kernels([kernel, kernel]).tolist() == pytest.approx([2.0, 2.0])
    seconds = model.exchanges([Exchange("all_reduce", 450_000_000_000, (8,))])
    assert isinstance(seconds, np.ndarray)
    assert seconds.tolist() == pytest.approx([1.0])


def test_model_reads_the_files_of_its_suffix(install: list[str], tmp_path: Path) -> None:
    install.append(".json = flat_cost_0:make")
    path = tmp_path / "mine.json"
    assert message(path) == f"the cost model {path} is no file: check the path"
    path.write_text('{"share": 0.25}', encoding="utf-8")
    kernel = Kernel("contract", "bf16", round(989.4e12), 1, "", matmul=True)
    assert load_cost_model(path, SYSTEM).kernels([kernel]).tolist() == pytest.approx([4.0])
    unknown = message("tables.xml")
    assert unknown == "there is no cost model 'tables.xml': take one of roofline, or a .json file"


def test_name_that_nobody_has() -> None:
    assert message("rooflin") == "there is no cost model 'rooflin': take one of roofline"


def test_package_that_can_not_be_loaded(install: list[str]) -> None:
    install.append("gone = flat_cost_0:nothing")
    expected = "module 'flat_cost_0' has no attribute 'nothing'"
    assert (
        message("gone")
        == f"the cost model 'gone' (flat_cost_0:nothing) can not be loaded ({expected}): reinstall it"
    )


def test_model_that_does_not_price(install: list[str]) -> None:
    install.append("half = flat_cost_0:half_made")
    assert message("half") == "the cost model 'half' (flat_cost_0:half_made) has no method kernels: add it"


def test_two_packages_of_one_name(install: list[str]) -> None:
    install.append("flat = flat_cost_0:make")
    install.append("flat = flat_cost_1:make")
    text = message("flat")
    assert text.startswith("two packages have a cost model 'flat', flat_cost_")
    assert text.endswith(": uninstall one")
