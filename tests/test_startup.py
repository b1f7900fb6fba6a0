"""Starting is fast and quiet: what loads, and how a process ends when its reader has gone."""

import subprocess
import sys

import pytest

HEAVY = ("sympy", "numpy", "networkx", "jinja2")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("line", [["--help"], ["synth", "--help"], ["models"], ["strategies", "--json"]])
def test_what_computes_nothing_loads_no_mathematics(line: list[str]) -> None:
    code = f"import sys; from stage.cli import main; main({line}); print([m for m in {HEAVY} if m in sys.modules])"
    assert run(code) == "[]"


def test_import_of_the_package_loads_nothing_else() -> None:
    code = "import sys, stage; print(sorted(m for m in sys.modules if m.startswith('stage.')))"
    assert run(code) == "[]"


def test_public_names_resolve() -> None:
    import stage

    for name in stage.__all__:
        assert getattr(stage, name) is not None
    assert dir(stage) == sorted(stage.__all__)
    with pytest.raises(AttributeError, match=r"^module 'stage' has no attribute 'bogus'$"):
        getattr(stage, "bogus")  # noqa: B009  # spelled so that mypy lets it through


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    command = [sys.executable, "-m", "stage", "strategies"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (1, "")
