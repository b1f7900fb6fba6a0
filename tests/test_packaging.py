"""The wheel: what it holds, and that it works with the sources out of reach."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def install(wheel: Path, folder: Path, *options: str) -> Path:
    """The console script of the wheel in a new environment, installed by the pip of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True, capture_output=True, timeout=600)
    return folder / "bin" / "stage"


@pytest.fixture(scope="module")
def script(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in an environment that has the wheel, and the dependencies from this environment.

    The path file hands over what is installed here, and not the checkout, whose own path file is not followed.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    found = install(wheel, folder, "--no-deps")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def run(script: Path, *line: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [script, *line], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_top_level_of_the_wheel_is_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"stage"}
    for kind in ("models", "parallelism", "templates"):
        for path in (ROOT / kind).iterdir():
            if path.is_file():
                assert f"stage/_content/{kind}/{path.name}" in names
    for path in (*(ROOT / "stage/cost/systems").iterdir(), *(ROOT / "stage/published/data").iterdir()):
        assert path.relative_to(ROOT).as_posix() in names
    assert "stage/py.typed" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_installed_wheel_lists_its_content_from_anywhere(script: Path, tmp_path: Path) -> None:
    python = script.parent / "python"
    where = run(python, "-c", "import stage; print(stage.__file__)", cwd=tmp_path)
    assert str(script.parent.parent) in where
    assert str(ROOT) not in where
    assert "megatron_sp" in run(script, "strategies", cwd=tmp_path)
    assert "llama3-8b" in run(script, "models", cwd=tmp_path)


@pytest.mark.slow
def test_the_demo_runs_from_the_installed_wheel(script: Path, tmp_path: Path) -> None:
    recipe = re.findall(r"^\t\$\(BIN\)/stage (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert [line.split()[0] for line in recipe] == ["synth", "verify", "show"]
    for line in recipe:
        run(script, *line.replace("$(DEMO)", "demo").split(), cwd=tmp_path)
    assert len(list((tmp_path / "demo").glob("*.et"))) == 8


@pytest.mark.full
def test_declared_dependencies_install_and_suffice(wheel: Path, tmp_path: Path) -> None:
    script = install(wheel, tmp_path / "venv")
    assert "llama3-8b" in run(script, "models", cwd=tmp_path)
    run(script, "show", "llama3-8b", cwd=tmp_path)


def test_every_import_of_the_engine_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [line for name in extras if name != "dev" for line in extras[name]]
    declared = {re.split(r"[<>=\[]", line)[0].lower() for line in lines}
    imports: set[str] = set()
    for path in (ROOT / "stage").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imports.add((node.module or "").split(".")[0])
    foreign = imports - set(sys.stdlib_module_names) - {"stage"}
    assert foreign <= declared
