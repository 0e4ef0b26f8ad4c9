"""Sweeps: their points, what is shared between them, and what they find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raincheck_hf.bench.context import context_table, seen
from raincheck_hf.bench.quality import run_quality
from raincheck_hf.bench.rows import RowFile, key_of
from raincheck_hf.bench.settings import Settings, config_from, point_fields
from raincheck_hf.bench.summary import summarise
from raincheck_hf.bench.sweep import AXES, VALUES, Sweep, run_sweep, sweep_tables
from raincheck_hf.bench.tables import texts
from raincheck_hf.cli import main
from raincheck_hf.config import RaincheckConfig

BOARDS = Settings(
    selectors=("uniform",), boards=0, reads=1, read_turns=2, read_size=(4, 8),
    guard_tokens=2, chunk_size=7,
)  # fmt: skip


def points(sweep: Sweep, model: str) -> list[tuple]:
    job = next(job for job in sweep.jobs() if job.model == model)
    fields = ("way", "retention", "chunk_size", "guard_tokens")
    return [tuple(label[field] for field in fields) for label in sweep.labels(job)]


def test_each_axis_varies_one_thing() -> None:
    assert VALUES["retention"] == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert VALUES["chunk_size"] == (7, 15, 31, 63)
    assert VALUES["guard_tokens"] == (0, 8, 16, 32)
    whole = Sweep(Settings(selectors=("mmtok",)))
    every = points(whole, "qwen3_5")
    assert len(every) == len(set(every))
    base = (0.3, 31, 16)
    for way, *fields in every:
        changed = [own for own, usual in zip(fields, base, strict=True) if own not in (usual, None)]
        assert len(changed) <= 1 or way == "full"
        assert not changed or way in ("full", "hard", "raincheck")
    # full; hard and raincheck at 7 retentions; 3 chunks and 3 guards more; the four rivals.
    assert len(every) == 1 + 2 * 7 + 3 + 3 + 4
    assert set(every) - set(points(whole, "qwen3_vl")) == {("uncorrected", *base)}


def test_a_label_says_what_matters_and_can_be_run() -> None:
    base = RaincheckConfig(retention=0.4, chunk_size=7, guard_tokens=3, selector="random")
    hard = point_fields("hard", base)
    assert (hard["chunk_size"], hard["guard_tokens"]) == (None, None)
    assert point_fields("full", base)["selector"] is None
    again = config_from(point_fields("raincheck", base), draw=5)
    assert again == base.replace(completion="lazy", seed=5)


def test_bad_sweeps_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown axis"):
        Sweep(BOARDS, ("chunks",))
    with pytest.raises(ValueError, match="retention"):
        Sweep(BOARDS, ("retention",), {"retention": (0.3, 1.5)})


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sweep, Path, list[dict]]:
    """Both architectures, a few points on every axis."""
    values = {"retention": (0.3, 0.6), "chunk_size": (3, 7), "guard_tokens": (0, 31)}
    sweep = Sweep(BOARDS, AXES, values)
    out = tmp_path_factory.mktemp("sweep") / "rows.jsonl"
    return sweep, out, run_sweep(sweep, out)


def test_a_sweep_finds_what_it_must(swept: tuple[Sweep, Path, list[dict]]) -> None:
    _, _, rows = swept
    found = {(row["model"], row["way"], row["retention"], row["chunk_size"],
              row["guard_tokens"]): row for row in rows}  # fmt: skip
    for model in BOARDS.models:
        few, many = (found[model, "hard", retention, None, None] for retention in (0.3, 0.6))
        assert len(few["selected"]) == 10 and len(many["selected"]) == 20
        early = found[model, "raincheck", 0.3, 7, 0]
        assert early["restored_per_step"][:1] == [7]
        small = found[model, "raincheck", 0.3, 3, 2]
        assert set(small["restored_per_step"]) <= {0, 1, 3}
        assert not found[model, "post_answer", 0.3, None, None]["restored_per_step"]
        # Nothing rides within 31 plain passes, so that this is hard pruning in the first answer.
        late = found[model, "raincheck", 0.3, 7, 31]
        assert late["said"][0][:31] == few["said"][0][:31]


def test_tables_and_the_second_run(swept: tuple[Sweep, Path, list[dict]]) -> None:
    sweep, out, rows = swept
    before = out.read_bytes()
    assert run_sweep(sweep, out) == rows and out.read_bytes() == before
    table = texts(sweep_tables(sweep.points(), rows))
    for axis in AXES:
        assert f"{axis}: reading, qwen3_5, uniform, 1 boards" in table
    assert "correction: reading, qwen3_vl" not in table


def test_quality_takes_over_rows_of_a_sweep(
    swept: tuple[Sweep, Path, list[dict]], tmp_path: Path
) -> None:
    _, out, rows = swept
    shared = tmp_path / "rows.jsonl"
    shared.write_bytes(out.read_bytes())
    run_quality(BOARDS, shared)
    # By model: full, hard, raincheck and post-answer, all of which the sweep has measured.
    assert shared.read_bytes() == out.read_bytes()
    keys = {key_of(row) for row in rows}
    assert len(RowFile(out)) == len(keys)


def test_context_counts_what_an_answer_could_see(swept: tuple[Sweep, Path, list[dict]]) -> None:
    row = {
        "answer_tokens": [6, 2], "selected": [0, 1], "n_visual": 10, "restored_per_step": [0, 3, 5],
        "guard_tokens": 1, "task": "t", "model": "m", "selector": "s", "way": "raincheck",
        "retention": 0.2, "chunk_size": 5,
    }  # fmt: skip
    [one] = seen([row])
    # y_1 to y_3 see 2; the chunk that rides with y_2 is seen by y_4, the one with y_3 by y_5.
    assert one.initial == pytest.approx(0.2)
    assert one.mean == pytest.approx((0.2 * 3 + 0.5 + 1.0 * 2) / 6)
    assert one.last == pytest.approx(1.0)
    measured = seen(swept[2])
    by_way = {one.point[1]: one for one in measured if one.model == "qwen3_5"}
    assert by_way["full"].mean == 1
    assert by_way["hard"].mean == by_way["hard"].initial == by_way["hard"].last
    assert "mean over the answer" in context_table(measured).text()


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    boards = "--arch qwen3_vl --reads 1 --read-size 3 4 --read-turns 1 --processes 1 --out"
    words = f"bench sweep --axes retention order --retentions 0.3 0.5 {boards} {out}"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "retention: reading, qwen3_vl, mmtok" in printed and "order: reading" in printed
    assert out.with_suffix(".sweep.json").exists()
    words = f"bench context --boards 0 --retentions 0.3 0.5 {boards} {out}"
    before = out.read_bytes()
    assert main(words.split()) == 0
    assert "mean over the answer" in capsys.readouterr().out
    assert out.read_bytes() == before  # the sweep had measured it all
    assert summarise(RowFile(out).rows([key_of(row) for row in _rows(out)]))


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
