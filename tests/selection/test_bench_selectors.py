"""`raincheck-hf bench selectors`: rows, resuming, what it refuses, and what it finds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from raincheck_hf.bench import selectors as bench
from raincheck_hf.bench.selectors_agreement import OBJECTIVES, difference
from raincheck_hf.bench.selectors_inputs import again, grid_of, make_input
from raincheck_hf.bench.selectors_pictures import draw_selections
from raincheck_hf.bench.selectors_speed import measure_speed, percentiles
from raincheck_hf.cli import main
from raincheck_hf.kernels import choice
from raincheck_hf.kernels import greedy as plain
from raincheck_hf.selection import list_selectors, select

SMALL = bench.Plan(
    parts=("speed", "overlap"),
    selectors=("mmtok", "divprune", "uniform"),
    sizes=(256,),
    models=("qwen3_vl",),
    boards=2,
    runs=2,
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    return out, bench.run_selectors(SMALL, out)


def test_rows_say_what_where_and_how_long(measured: tuple[Path, list[dict]]) -> None:
    out, rows = measured
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    assert [(row["part"], row["selector"]) for row in rows] == [
        (part, name) for part in SMALL.parts for name in SMALL.selectors
    ]
    for row in rows:
        assert {"machine", "versions", "commit", "device", "retention"} <= set(row)
    for row in rows[:3]:
        assert row["budget"] == row["selected"] == 77
        assert 0 < row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
        assert ("twin_ms" in row) == (row["selector"] in OBJECTIVES)
        assert row.get("difference", 0) <= 1e-5


def test_a_second_run_measures_nothing_again(
    measured: tuple[Path, list[dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rows = measured
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured again"))
    before = out.read_text()
    assert bench.run_selectors(SMALL, out) == rows
    assert out.read_text() == before


def test_a_cut_line_is_measured_again(
    measured: tuple[Path, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rows = measured
    cut = tmp_path / "cut.jsonl"
    cut.write_text(out.read_text()[:-40])
    monkeypatch.setattr(bench, "_measure", lambda plan, label: {"missing": 0.5})
    again_rows = bench.run_selectors(SMALL, cut)
    assert again_rows[:-1] == rows[:-1]
    assert again_rows[-1]["missing"] == 0.5
    assert json.loads(cut.read_text().splitlines()[-1]) == again_rows[-1]


def test_only_methods_that_read_the_question_choose_anew(
    measured: tuple[Path, list[dict]],
) -> None:
    missing = {row["selector"]: row["missing"] for row in measured[1] if row["part"] == "overlap"}
    assert missing["uniform"] == missing["divprune"] == 0
    assert 0 < missing["mmtok"] < 1


def test_a_twin_that_reaches_more_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def poor(distance: torch.Tensor, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
        if choice._loops_only.get():
            return plain.max_min(distance, budget)
        return torch.arange(budget), distance[0]

    monkeypatch.setattr("raincheck_hf.selection.divprune.max_min", poor)
    with pytest.raises(RuntimeError, match="divprune reaches"):
        measure_speed("divprune", 256, 0.3, "cpu", "float32", 1)


@pytest.mark.parametrize("name", list_selectors())
def test_made_up_inputs_suit_every_method(name: str) -> None:
    context = make_input(name, 256, "cpu", torch.bfloat16)
    assert context.embeds.shape == (256, 4096) and context.features.shape == (256, 1152)
    assert context.kind == (("video",) if name in ("evs", "vidcom2") else ("image",))
    masks = [select(again(context), name, 0.3).mask for _ in range(2)]
    assert torch.equal(*masks) and masks[0].sum() == 77


def test_sizes() -> None:
    assert grid_of(4096, video=False) == (1, 64, 64)
    assert grid_of(4096, video=True) == (16, 16, 16)
    assert grid_of(16384, video=True) == (64, 16, 16)
    for size in (0, 64, 300, 2048):
        with pytest.raises(ValueError, match="powers of 4"):
            grid_of(size, video=False)


def test_percentiles_and_differences() -> None:
    assert percentiles([5.0]) == {"p20": 5.0, "p50": 5.0, "p80": 5.0}
    assert percentiles([float(value) for value in range(11)]) == {"p20": 2, "p50": 5, "p80": 8}
    assert difference(-np.inf, -np.inf) == 0
    assert difference(1.1, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "300"], "powers of 4"),
        (["--selectors", "nonsense"], "unknown selector"),
        (["--parts", "nonsense"], "unknown part"),
        (["--device", "cuda:99"], "is not there"),
        (["--retention", "0"], "retention"),
        (["--dtype", "float33"], "dtype"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "selectors", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--parts", "speed", "accuracy", "--selectors", "uniform", "--sizes", "256"]
    arguments += ["--arch", "qwen3_vl", "--boards", "1", "--runs", "1", "--out", str(out)]
    assert main(["bench", "selectors", *arguments]) == 0
    text = capsys.readouterr().out
    assert "256 [ms]" in text and "raincheck" in text and "hard" in text
    assert out.exists() and out.with_suffix(".quality.jsonl").exists()


def test_pictures_mark_what_is_selected(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    plan = bench.Plan(selectors=("uniform", "saliency"), models=("qwen3_vl",))
    (path,) = draw_selections(plan, tmp_path, photos=("chelsea",))
    assert path.name == "selectors-chelsea.png"
    assert path.stat().st_size < 500_000
    picture = np.asarray(Image.open(path).convert("RGB")).astype(int)
    # Panels are far brighter where they are dimmed; both panels have both kinds of cells.
    for left in (24, 24 + 312):
        panel = picture[72 : 72 + 288, left : left + 288].mean(2)
        assert (panel < 140).mean() > 0.05 and (panel > 190).mean() > 0.4
