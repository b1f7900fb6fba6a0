"""The documentation is true: every snippet of README and docs runs, in order, and prints what is shown below it.

A fence of `sh` or `python` is run, and must succeed; with `file=NAME` it is a file for those after it. The lines of a
`text` fence right behind it are found in its output, in order; a line `...` stands for any lines. Fences without a
language are for what the suite does not do: install a package, run itself.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import stage

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]+)")


def str_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Snippet:
    """A fence: its language, the file it is to be, its text, and what is shown as its output."""

    language: str
    file: str
    body: str
    shown: tuple[str, ...] = ()


def snippets(page: Path) -> list[Snippet]:
    found: list[Snippet] = []
    text, end = page.read_text(encoding="utf-8"), 0
    for fence in FENCE.finditer(text):
        language, _, rest = fence["info"].partition(" ")
        if language == "text" and found and not text[end : fence.start()].strip():
            last = found.pop()
            found.append(Snippet(last.language, last.file, last.body, tuple(fence["body"].splitlines())))
        elif language:
            found.append(Snippet(language, rest.removeprefix("file="), fence["body"]))
        end = fence.end()
    return found


def missing(shown: tuple[str, ...], output: str) -> list[str]:
    """The lines that are shown but do not stand in the output after those shown before them."""
    lines = iter([line.rstrip() for line in output.splitlines()])
    return [line for line in shown if line != "..." and line.rstrip() not in lines]


def run(snippet: Snippet, folder: Path) -> str:
    program = [sys.executable, "-"] if snippet.language == "python" else ["bash", "-euo", "pipefail", "-s"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    home = str(Path(stage.__file__).resolve().parent.parent)
    done = subprocess.run(
        program,
        input=snippet.body,
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "80", "PYTHONPATH": home, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{snippet.body}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=str_of)
def test_snippets_run_and_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    examples = tmp_path / "docs" / "examples"
    examples.mkdir(parents=True)
    for source in (ROOT / "docs" / "examples").iterdir():
        if source.is_file():
            (examples / source.name).write_bytes(source.read_bytes())
    for snippet in snippets(page):
        if snippet.file:
            (tmp_path / snippet.file).write_text(snippet.body, encoding="utf-8")
            continue
        if snippet.language in {"sh", "python"}:
            output = run(snippet, tmp_path)
            assert missing(snippet.shown, output) == [], f"{snippet.body}\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=str_of)
def test_every_snippet_says_what_it_is(page: Path) -> None:
    known = {"sh", "python", "text", "toml", "json"}
    assert {snippet.language for snippet in snippets(page)} <= known
    assert all(snippet.file for snippet in snippets(page) if snippet.language == "toml")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=str_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [path for path in PAGES if path.parent.name == "docs"], ids=str_of)
def test_every_page_is_listed(page: Path) -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert page.name == "README.md" or f"({page.name})" in index


def test_output_is_compared_line_by_line() -> None:
    assert missing(("a", "...", "c"), "a  \nb\nc\n") == []
    assert missing(("c", "a"), "a\nb\nc\n") == ["a"]
