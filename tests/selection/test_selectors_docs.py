"""docs/selectors.md: its examples run, and it describes every method with its paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from raincheck_hf.selection import list_selectors, registry

DOCS = Path(__file__).parents[2] / "docs" / "selectors.md"
PAPERS = {
    "mmtok": "2508.18264",
    "cdpruner": "2506.10967",
    "divprune": "2503.02175",
    "saliency": "2412.04467",
    "vispruner": "2412.01818",
    "scope": "2510.24214",
    "evs": "2510.14624",
    "vidcom2": "2505.14454",
    "uniform": "–",
    "random": "–",
}


def test_the_examples_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_SELECTORS", dict(registry._SELECTORS))
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2
    assert "centre" in list_selectors()
    assert capsys.readouterr().out.count("1") == 11
    body = blocks[0].split("def centre")[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10
    assert isinstance(names["board"].embeds, torch.Tensor)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PAPERS)
def test_the_table_names_each_method_and_its_paper(name: str) -> None:
    text = DOCS.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    assert PAPERS[name] in row
    module = registry.get_selector(name).__module__
    source = Path(__import__(module, fromlist=["x"]).__file__).read_text(encoding="utf-8")
    assert PAPERS[name] == "–" or PAPERS[name] in source


def test_every_built_in_method_is_described() -> None:
    built_in = {
        name
        for name in list_selectors()
        if registry.get_selector(name).__module__.startswith("raincheck_hf.")
    }
    assert built_in == set(PAPERS)
