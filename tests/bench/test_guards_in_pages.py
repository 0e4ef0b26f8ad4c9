"""A rival of raincheck that ran behind several guards, in the tables of a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raincheck_hf.bench.pages import tables_of
from raincheck_hf.bench.rows import KEY


def row(way: str, right: int, guard: int | None = None, **fields: Any) -> dict:
    """One question about one board; what has a guard restores during decode."""
    own = {
        **dict.fromkeys(KEY), "bench": "quality", "task": "cells", "model": "m", "board": 0,
        "way": way, "selector": None if way == "full" else "mmtok",
        "retention": 1.0 if way == "full" else 0.3, "chunk_size": None if guard is None else 31,
        "guard_tokens": guard, "turns": 1, "right": [[right]], "said": ["7"], "truth": ["7"],
        "answer_tokens": [2], "selected": [0], "n_visual": 4, "restored_per_step": [],
    }  # fmt: skip
    return own | fields


def body(path: Path, rows: list[dict], axis: str) -> list[tuple[str, str]]:
    """First column and accuracy of turn 1."""
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    [table] = tables_of([path])[f"sweep-{axis}"]
    at = table.head.index("turn 1")
    return [(line[0], line[at]) for line in table.body]


def test_a_rival_is_set_against_raincheck_behind_each_guard(tmp_path: Path) -> None:
    rows = [row("full", 1), row("hard", 0), row("post_answer", 0)]
    # The usual guard is the most frequent one.
    rows += [row("raincheck", 1, 16), row("relevance", 1, 16), row("uncorrected", 1, 16)]
    alone = [*rows, row("raincheck", 0, 8)]
    assert body(tmp_path / "one.jsonl", alone, "correction") == [
        ("raincheck", "1.000"), ("uncorrected", "1.000"),
    ]  # fmt: skip
    several = [*alone, row("raincheck", 0, 0), row("uncorrected", 1, 0)]
    # A model without the rival has no table, though raincheck ran behind both guards.
    ways = [("full", None), ("hard", None), ("raincheck", 16), ("raincheck", 0)]
    several += [row(way, 1, guard, model="n") for way, guard in ways]
    out = tmp_path / "several.jsonl"
    assert body(out, several, "correction") == [
        ("raincheck, guard 0", "0.000"), ("uncorrected, guard 0", "1.000"),
        ("raincheck, guard 16", "1.000"), ("uncorrected, guard 16", "1.000"),
    ]  # fmt: skip
    # An axis whose rival ran behind one guard alone stays as it was.
    assert body(out, several, "order") == [("raincheck", "1.000"), ("relevance", "1.000")]
    assert body(out, several, "defer") == [("raincheck", "1.000"), ("post_answer", "0.000")]
