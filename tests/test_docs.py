"""Every Python block of the README and the docs runs, in order, one namespace a file."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

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


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
