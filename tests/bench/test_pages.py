"""Tables of rows as Markdown, and documents that hold them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from raincheck_hf.bench.kinds import base_of, of_one_kind
from raincheck_hf.bench.pages import fill, tables_of
from raincheck_hf.bench.rows import KEY
from raincheck_hf.bench.summary import summarise
from raincheck_hf.bench.tables import Table
from raincheck_hf.cli import main


def row(way: str, right: int, retention: float = 0.3, **fields: object) -> dict:
    restores = way == "raincheck"
    own = {
        **dict.fromkeys(KEY), "bench": "quality", "task": "cells", "model": "m", "board": 0,
        "way": way, "selector": None if way == "full" else "mmtok",
        "retention": 1.0 if way == "full" else retention, "chunk_size": 31 if restores else None,
        "guard_tokens": 16 if restores else None, "turns": 2, "right": [[0], [right]],
        "said": ["7", "7"], "truth": ["7", "7"], "answer_tokens": [2, 2], "selected": [0],
        "n_visual": 4, "restored_per_step": [], "machine": "one", "commit": "abc", "versions": {},
    }  # fmt: skip
    return own | fields


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    every = [row("full", 1), row("hard", 0), row("raincheck", 1)]
    every += [row("hard", 0, 0.5), row("raincheck", 1, 0.5), {"bench": "latency"}]
    path.write_text("\n".join(map(json.dumps, every)) + "\n", encoding="utf-8")
    return path


def test_tables_by_name(rows: Path) -> None:
    tables = tables_of([rows])
    assert set(tables) == {"cells", "sweep-retention", "context", "origin"}
    [cells] = tables["cells"]
    assert [line[:2] for line in cells.body] == [
        ["-", "full"], ["mmtok", "hard"], ["mmtok", "raincheck"],
    ]  # fmt: skip
    [sweep] = tables["sweep-retention"]
    assert [line[0] for line in sweep.body] == ["0.3", "0.5"]
    [origin] = tables["origin"]
    assert ["one", "", "abc", "5"] in [list(line) for line in origin.body]


def test_a_table_as_markdown() -> None:
    table = Table("of things", ["name", "count"], [["a", "1"], ["b", "22"]], left=1)
    assert table.markdown().splitlines() == [
        "**of things**", "", "| name | count |", "| :-- | --: |", "| a | 1 |", "| b | 22 |",
    ]  # fmt: skip


def test_places_of_a_document_are_filled_again(rows: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n<!-- table cells -->\nold\n<!-- end -->\nbetween\n"
        "<!-- table memory -->\nstays\n<!-- end -->\n",
        encoding="utf-8",
    )
    assert fill(page, tables_of([rows])) == ["cells"]
    once = page.read_text("utf-8")
    assert "old" not in once and "| mmtok | raincheck |" in once
    assert "between\n<!-- table memory -->\nstays\n<!-- end -->" in once
    fill(page, tables_of([rows]))
    assert page.read_text("utf-8") == once
    page.write_text("# Nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no place"):
        fill(page, tables_of([rows]))


def test_rows_that_cannot_be_compared_stay_apart() -> None:
    own = [row("full", 1), row("raincheck", 1), row("hard", 0)]
    other = [row("raincheck", 0, seed=5), row("raincheck", 0, seed=5)]
    assert of_one_kind([*own, *other, *own]) == own
    base = base_of(summarise(own))
    assert base is not None and vars(base) == {
        "retention": 0.3, "chunk_size": 31, "guard_tokens": 16,
    }  # fmt: skip
    assert base_of([]) is None


def test_the_command(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tables", str(rows)]) == 0
    assert "<!-- cells -->\n**cells, m, 1 boards**" in capsys.readouterr().out
    assert main(["bench", "tables", str(rows), "--into", str(tmp_path / "no.md")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_places_in_the_docs_have_names_that_exist() -> None:
    page = Path(__file__).parents[2] / "docs" / "results.md"
    places = set(re.findall(r"<!-- table ([\w-]+) -->", page.read_text("utf-8")))
    assert places
    axes = {"retention", "chunk-size", "guard-tokens", "defer", "order", "correction", "visibility"}
    known = {"cells", "reading", "context", "state-map", "memory", "gaps", "origin"}
    assert places <= known | {f"sweep-{axis}" for axis in axes}
