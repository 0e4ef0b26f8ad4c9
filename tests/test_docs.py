"""Every Python block of the README and the docs runs, in order, one namespace a file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

from raincheck_hf.cli import build_parser

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n+<!-- prints -->\n```\n(.*?)^```)?", re.M | re.S)
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    if BLOCK.search(page.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_run_and_print_what_they_say(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for code, expected in BLOCK.findall(page.read_text(encoding="utf-8")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), names)
        if expected:
            assert printed.getvalue().strip() == expected.strip()


def shell_lines() -> list[str]:
    """Commands of all shell blocks; a block without a language that names ours counts too."""
    lines: list[str] = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
            lines += [line.partition("#")[0].strip() for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith(("make ", "raincheck-hf", "python "))})


@pytest.mark.parametrize("line", shell_lines())
def test_the_commands_of_the_docs_exist(line: str) -> None:
    """`make` targets are there, and our own commands parse. What they do is tested elsewhere."""
    program, *arguments = shlex.split(line)
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
        assert set(arguments) <= set(targets)
    elif program == "raincheck-hf":
        build_parser().parse_args(arguments)
    elif arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
    else:
        source = (ROOT / arguments[0]).read_text("utf-8")
        assert all(f'"{word}"' in source for word in arguments[1:] if word.startswith("--"))


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
