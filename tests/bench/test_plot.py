"""Pictures of rows: which ones, and that they hold what the rows say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raincheck_hf.bench.plot import draw
from raincheck_hf.bench.plots_costs import memory_figures
from raincheck_hf.bench.plots_quality import quality_figures
from raincheck_hf.bench.rows import KEY
from raincheck_hf.cli import main

pytest.importorskip("matplotlib")  # an extra of the package


def quality(board: int, way: str, right: float, **fields: object) -> dict:
    restores = way == "raincheck"
    row = {
        **dict.fromkeys(KEY), "bench": "quality", "task": "reading", "model": "some/where/m",
        "board": board, "way": way, "selector": None if way == "full" else "mmtok",
        "retention": 1.0 if way == "full" else 0.3, "chunk_size": 31 if restores else None,
        "guard_tokens": 16 if restores else None, "size": [4, 5], "turns": 2,
        "said": ["7" * 20, "7"], "truth": ["7" * 20, "7"], "n_visual": 20,
        "answer_tokens": [21, 2], "selected": list(range(6)),
        "restored_per_step": [0] * 16 + [14] if restores else [],
        "right": [[1] * int(20 * right) + [0] * (20 - int(20 * right)), [int(way != "hard")]],
    }  # fmt: skip
    return row | fields


ROWS = [
    quality(board, way, right, **point)
    for board in range(3)
    for way, right, point in (
        ("full", 1.0, {}),
        ("hard", 0.25, {}),
        ("raincheck", 0.75, {}),
        ("post_answer", 0.25, {}),
        ("hard", 0.5, {"retention": 0.5, "selected": list(range(10))}),
        ("raincheck", 0.9, {"retention": 0.5, "selected": list(range(10))}),
        ("raincheck", 0.6, {"guard_tokens": 32, "restored_per_step": []}),
    )
]


def line(figure: object, panel: int, label: str) -> np.ndarray:
    lines = figure.axes[panel].get_lines()  # type: ignore[attr-defined]
    return next(one.get_ydata() for one in lines if one.get_label() == label)


def test_quality_rows_give_curves_along_what_was_varied() -> None:
    found = dict(quality_figures(ROWS))
    assert set(found) == {
        "recovery-reading", "positions-reading", "sweep-retention-reading",
        "sweep-guard-tokens-reading", "context-reading",
    }  # fmt: skip
    curve = found["sweep-retention-reading"]
    assert line(curve, 0, "raincheck") == pytest.approx([0.75, 0.9])
    assert line(curve, 0, "hard") == pytest.approx([0.25, 0.5])
    assert line(found["sweep-guard-tokens-reading"], 0, "raincheck") == pytest.approx([0.75, 0.6])
    assert found["positions-reading"].axes[0].get_title() == "m, mmtok, 3 boards"


def test_rows_of_another_kind_of_board_are_not_mixed_in() -> None:
    other = [quality(board, "raincheck", 0.1, size=[8, 8]) for board in range(3)]
    found = dict(quality_figures([*ROWS, *other, *ROWS]))
    curve = found["sweep-retention-reading"]
    assert line(curve, 0, "raincheck") == pytest.approx([0.75, 0.9])
    assert found["positions-reading"].axes[0].get_title() == "m, mmtok, 3 boards"


def test_memory_bars_stack_to_what_is_held() -> None:
    held = {"weights": 5 << 20, "kv": 3 << 20, "recurrent": 2 << 20, "maps": 1 << 20, "staged": 0}
    rows = [{"bench": "memory", "model": "m", "way": "full", "peak": held, "steady": held}]
    [(name, figure)] = memory_figures(rows)
    assert name == "memory"
    tops = [bar.get_y() + bar.get_height() for bar in figure.axes[0].patches]
    assert max(tops) == pytest.approx(6)


def test_the_command_draws_and_says_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    times = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    maps = [
        {"bench": "state_map", "model": "m", "layer": layer, "suffix": suffix, "device": "cpu",
         "error": 1e-7, "replay_error": 1e-7, "unjoined": 0.1, "norm": {"mean": 0.5},
         "token_us": times, "join_us": times, "replay_us": times}
        for layer in (0, 2) for suffix in (8, 64)
    ]  # fmt: skip
    waits = [
        {"bench": "gaps", "model": "m", "given_rate": None, "rate": 9.0, "pending": pending,
         "share": 0.5, "mean_s": 0.1}
        for pending in (10, 20)
    ]  # fmt: skip
    other = [{"bench": "latency"}, {"part": "speed"}, {"bench": "quality"}]
    text = "\n".join(json.dumps(row) for row in [*maps, *waits, *other])
    rows.write_text(text + "\n{cut", encoding="utf-8")
    out = tmp_path / "new" / "pictures"
    assert main(["plot", str(rows), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["gaps.png", "state-map-m.png"]
    assert all(path.stat().st_size > 5000 for path in out.iterdir())
    err = capsys.readouterr().err
    for kind in ("'latency'", "'speed'", "'unknown'"):
        assert f"1 row(s) of {kind} have no picture" in err
    assert "1 unreadable" in err


def test_nothing_to_draw_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"part": "speed"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no row has a picture"):
        draw([rows], tmp_path)
    assert main(["plot", str(tmp_path / "missing.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
