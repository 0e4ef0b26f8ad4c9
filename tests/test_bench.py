"""The quality measurement: its arithmetic, its file of rows, and what it finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raincheck_hf.bench import ways
from raincheck_hf.bench.checkpoints import fingerprint, is_recurrent, load, locate
from raincheck_hf.bench.dialogue import Asked, Script
from raincheck_hf.bench.measure import check_selections
from raincheck_hf.bench.plots import smooth
from raincheck_hf.bench.quality import run_quality, write_figures
from raincheck_hf.bench.rows import KEY, RowFile, key_of
from raincheck_hf.bench.settings import Settings
from raincheck_hf.bench.statistics import mean_interval, recovery, recovery_interval
from raincheck_hf.bench.summary import ALL, IN_GUARD, PAST_GUARD, Line, summarise
from raincheck_hf.bench.tables import quality_tables
from raincheck_hf.bench.tasks import make_exam, marks
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.tiny import NAMES
from raincheck_hf.tiny.boards import FIRST_HELD_OUT

SMALL = Settings(
    selectors=("random",),
    boards=2,
    turns=3,
    size=(4, 4),
    reads=1,
    read_turns=2,
    read_size=(4, 5),
    guard_tokens=4,
    chunk_size=5,
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Line]]:
    """A small measurement of both architectures."""
    out = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    return out, run_quality(SMALL, out)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def figures(lines: list[Line]) -> list[dict]:
    """To compare: not-a-number, which differs from itself, is None here."""
    return [line.to_dict() for line in lines]


# -- arithmetic -------------------------------------------------------------------------------


def test_recovery_of_made_up_numbers() -> None:
    assert recovery(0.9, 0.4, 0.9) == pytest.approx(1.0)
    assert recovery(0.9, 0.4, 0.4) == pytest.approx(0.0)
    assert recovery(0.9, 0.4, 0.8) == pytest.approx(0.8)
    assert recovery(0.9, 0.4, 0.3) == pytest.approx(-0.2)
    assert np.isnan(recovery(0.5, 0.5, 0.7))
    assert np.isnan(recovery(0.4, 0.5, 0.5))


def test_intervals_contain_their_point_and_repeat() -> None:
    rng = np.random.default_rng(3)
    full, hard, way = (rng.binomial(3, rate, 60) / 3 for rate in (0.95, 0.35, 0.9))
    interval = recovery_interval(full, hard, way)
    assert interval.low < interval.point < interval.high
    assert interval.point == pytest.approx((way.mean() - hard.mean()) / (full.mean() - hard.mean()))
    assert interval == recovery_interval(full, hard, way)
    mean = mean_interval(hard)
    assert mean.point == pytest.approx(hard.mean())
    assert mean.low < mean.point < mean.high


def test_intervals_are_paired() -> None:
    """A way that loses on each board just what full loses there recovers 1, without spread."""
    rng = np.random.default_rng(4)
    full, hard = rng.random(30) + 1, rng.random(30)
    interval = recovery_interval(full, hard, full)
    assert (interval.low, interval.point, interval.high) == pytest.approx((1, 1, 1))
    with pytest.raises(ValueError, match="one length"):
        recovery_interval(full, hard[1:], full)


def test_no_loss_is_no_number() -> None:
    same = np.array([1.0, 0.0, 1.0])
    interval = recovery_interval(same, same, same)
    assert interval.to_dict() == {"point": None, "low": None, "high": None}


def test_marks_count_what_is_missing_as_wrong() -> None:
    assert marks("123", "123") == [1, 1, 1]
    assert marks("1", "123") == [1, 0, 0]
    assert marks("", "7") == [0]
    assert marks("7999", "7") == [1]


def test_smoothing_keeps_a_level() -> None:
    assert smooth(np.full(30, 0.25)) == pytest.approx(np.full(30, 0.25))
    assert len(smooth(np.arange(3.0))) == 3


# -- tasks ------------------------------------------------------------------------------------


def test_exams_are_held_out_and_fixed_by_the_seed() -> None:
    exam, again = (make_exam("cells", (8, 8), 4, seed=5, number=2) for _ in range(2))
    assert exam.asked == again.asked and exam.draw == again.draw
    assert (exam.board.index == again.board.index).all()
    assert exam.board.index.min() >= FIRST_HELD_OUT
    assert len({ask.question for ask in exam.asked}) == 4
    other = make_exam("cells", (8, 8), 4, seed=6, number=2)
    assert (exam.board.index != other.board.index).any() and exam.draw != other.draw
    reads = make_exam("reading", (3, 4), 1, seed=5, number=2)
    assert reads.asked[0].question == "Read the board."
    assert reads.asked[0].truth == "".join(map(str, reads.board.labels.ravel()))


# -- rows -------------------------------------------------------------------------------------


def row(
    board: int,
    way: str,
    right: list[list[int]],
    selector: str | None = "random",
    steps: tuple[int, ...] = (),
) -> dict:
    own = {"task": "cells", "model": "m", "board": board, "way": way, "selector": selector}
    own |= {"retention": 1.0 if way == "full" else 0.3}
    own |= {"guard_tokens": 16 if way == "raincheck" else None}
    more = {"right": right, "restored_per_step": list(steps), "selected": [0], "n_visual": 9}
    more |= {"said": ["7"] * len(right), "truth": ["7"] * len(right)}
    return {**dict.fromkeys(KEY), **own, **more}


def test_a_file_of_rows_grows_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    file = RowFile(path)
    first, second = row(0, "hard", [[1]]), row(1, "hard", [[0]])
    file.append([first])
    before = path.read_bytes()
    file.append([{**first, "right": [[0]]}, second])
    assert path.read_bytes().startswith(before)
    assert read(path) == [first, second]
    assert key_of(first) in RowFile(path) and len(RowFile(path)) == 2


def test_a_line_cut_short_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    whole = json.dumps(row(0, "hard", [[1]]))
    path.write_text(f"{whole}\n{whole[:40]}", encoding="utf-8")
    file = RowFile(path)
    assert (len(file), file.unreadable) == (1, 1)
    file.append([row(1, "hard", [[1]])])
    again = RowFile(path)
    assert (len(again), again.unreadable) == (2, 1)
    assert path.read_text(encoding="utf-8").startswith(f"{whole}\n{whole[:40]}\n")


def test_summary_of_made_up_rows() -> None:
    rows = []
    for board in range(10):
        miss = int(board != 0)
        rows.append(row(board, "full", [[1], [1], [1]], None))
        rows.append(row(board, "hard", [[0], [0], [0]]))
        rows.append(row(board, "raincheck", [[0], [1], [miss]]))
    rows.append(row(99, "raincheck", [[0], [0], [0]]))  # nothing to compare it with
    lines = {(line.way, line.span): line for line in summarise(rows)}
    later = lines["raincheck", "turns 2+"]
    assert later.boards == 10
    assert later.by_turn == pytest.approx((0, 1, 0.9))
    assert later.accuracy.point == pytest.approx(0.95)
    assert later.recovery is not None and later.recovery.point == pytest.approx(0.95)
    assert lines["raincheck", "all turns"].recovery.point == pytest.approx(1.9 / 3)  # type: ignore[union-attr]
    assert lines["hard", "turns 2+"].recovery is None
    assert (later.full, later.hard) == (1, 0)
    assert (later.ended_early, later.ended_in_guard) == (0, 10)
    assert later.dialogues == ALL  # where all ended in the guard, there are no parts
    table = quality_tables(list(lines.values()))
    assert "0.950" in table and "cells, m, 10 boards" in table


def test_dialogues_that_ended_in_the_guard_stand_apart() -> None:
    rows = []
    for board in range(10):
        rode = board < 6
        rows.append(row(board, "full", [[1], [1]], None))
        rows.append(row(board, "hard", [[0], [0]]))
        rows.append(row(board, "raincheck", [[int(rode)], [1]], steps=(0, 8) if rode else ()))
    lines = summarise(rows)
    found = {
        (line.dialogues, line.span): (line.boards, line.recovery.point)
        for line in lines
        if line.recovery is not None
    }
    assert found[ALL, "turn 1"] == (10, pytest.approx(0.6))
    assert found[PAST_GUARD, "turn 1"] == (6, pytest.approx(1))
    assert found[IN_GUARD, "turn 1"] == (4, pytest.approx(0))
    assert found[IN_GUARD, "turn 2"] == (4, pytest.approx(1))
    assert {line.dialogues for line in lines if line.way != "raincheck"} == {ALL}
    assert "raincheck, 4 in the guard" in quality_tables(lines)


def test_points_are_told_apart_and_matched_with_their_own_hard() -> None:
    rows = [row(0, "full", [[1]], None)]
    for retention, wrong in ((0.3, 0), (0.5, 1)):
        rows.append({**row(0, "hard", [[wrong]]), "retention": retention})
        rows.append({**row(0, "raincheck", [[1]]), "retention": retention})
    lines = [line for line in summarise(rows) if line.way == "raincheck"]
    assert [(line.retention, line.hard) for line in lines] == [(0.3, 0), (0.5, 1)]


def test_other_selections_are_not_compared() -> None:
    hard, rain = row(0, "hard", [[1]]), row(0, "raincheck", [[1]])
    check_selections([hard, rain, {**rain, "board": 1, "selected": [4]}])
    check_selections([hard, {**rain, "retention": 0.5, "selected": [4]}])
    with pytest.raises(RuntimeError, match="other tokens"):
        check_selections([hard, {**rain, "selected": [4]}])


# -- ways -------------------------------------------------------------------------------------


def test_ways_change_what_they_say() -> None:
    base = RaincheckConfig(selector="uniform", retention=0.25)
    assert ways.config_of("full", base).retention == 1
    assert ways.config_of("hard", base).drops
    assert ways.config_of("raincheck", base) == base
    assert ways.config_of("post_answer", base).defer == "post_answer"
    assert ways.config_of("relevance", base).order == "relevance"


# -- the measurement --------------------------------------------------------------------------


def test_rows_say_what_was_measured(measured: tuple[Path, list[Line]]) -> None:
    rows = read(measured[0])
    # By board and model: full and hard and raincheck, in reading post_answer.
    assert len(rows) == 2 * (2 * 3 + 4)
    for one in rows:
        assert set(KEY) <= set(one)
        assert {"torch", "transformers", "raincheck_hf"} <= set(one["versions"])
        assert one["machine"] and "commit" in one and one["seed"] == 0
        assert [len(turn) for turn in one["right"]] == [len(truth) for truth in one["truth"]]
        assert one["right"] == [
            marks(said, truth) for said, truth in zip(one["said"], one["truth"], strict=True)
        ]
        assert one["n_visual"] == one["size"][0] * one["size"][1]
        kept = one["n_visual"] if one["way"] == "full" else -(-one["n_visual"] * 3 // 10)
        assert len(one["selected"]) == kept
        assert len(one["answer_tokens"]) == one["turns"]
        assert all(
            tokens in (len(said), len(said) + 1)
            for tokens, said in zip(one["answer_tokens"], one["said"], strict=True)
        )


def test_ways_share_the_selection(measured: tuple[Path, list[Line]]) -> None:
    seen: dict[tuple, list[int]] = {}
    for one in read(measured[0]):
        if one["way"] != "full":
            place = (one["task"], one["model"], one["board"])
            assert seen.setdefault(place, one["selected"]) == one["selected"]
    draws = {tuple(cells) for (task, model, _), cells in seen.items() if task == "cells"}
    assert len(draws) == SMALL.boards  # the same on both models, another on each board


def test_only_raincheck_restores_during_the_answer(measured: tuple[Path, list[Line]]) -> None:
    for one in read(measured[0]):
        restored = sum(one["restored_per_step"])
        if one["task"] == "reading" and one["way"] == "raincheck":
            # Deferred are 14 of 20 cells. A model not at home on such a board may stop early.
            assert one["restored_per_step"] in (
                [0] * 4 + [5, 5, 4],
                [0] * 4 + [5, 5],
                [0] * 4 + [5],
                [],
            )
            assert bool(restored) == (len(one["said"][0]) > SMALL.guard_tokens)
        else:
            assert restored == 0


def test_nothing_is_measured_twice(measured: tuple[Path, list[Line]]) -> None:
    out, lines = measured
    before = out.read_bytes()
    assert figures(run_quality(SMALL, out)) == figures(lines)
    assert out.read_bytes() == before


def test_a_stopped_run_goes_on_to_the_same_numbers(
    measured: tuple[Path, list[Line]], tmp_path: Path
) -> None:
    out, lines = measured
    kept = out.read_text(encoding="utf-8").splitlines(keepends=True)
    resumed = tmp_path / "rows.jsonl"
    resumed.write_text("".join(kept[::2]), encoding="utf-8")
    assert figures(run_quality(SMALL, resumed)) == figures(lines)
    rows = {key_of(one): one for one in read(out)}
    assert {key_of(one): one for one in read(resumed)} == rows


def test_the_same_seed_gives_the_same_numbers(
    measured: tuple[Path, list[Line]], tmp_path: Path
) -> None:
    again = tmp_path / "rows.jsonl"
    assert run_quality(replace(SMALL, reads=0, models=("qwen3_5",)), again)
    first = {key_of(one): one for one in read(measured[0])}
    assert all(first[key_of(one)] == one for one in read(again))
    other = tmp_path / "other.jsonl"
    run_quality(replace(SMALL, reads=0, models=("qwen3_5",), seed=1), other)
    assert [one["truth"] for one in read(other)] != [one["truth"] for one in read(again)]


def test_figures_are_written(measured: tuple[Path, list[Line]], tmp_path: Path) -> None:
    path = write_figures(measured[1], tmp_path / "rows.summary.json")
    reads = [line for line in json.loads(path.read_text("utf-8")) if line["task"] == "reading"]
    assert {len(line["by_position"]) for line in reads} == {20}
    assert {line["span"] for line in reads} == {"turn 1", "turn 2", "turns 2+", "all turns"}


def test_the_pixels_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = load("qwen3_vl")
    exam = make_exam("cells", (3, 3), 2, seed=0, number=0)
    script = Script(processor, exam.board.image(), exam.asked)
    monkeypatch.setattr(processor, "image_processor", None)
    base = RaincheckConfig(selector="random", completion="lazy")
    assert len(script.run(model, "raincheck", base)) == 2


def test_a_follow_up_is_what_the_template_would_render() -> None:
    """Ids that grow turn by turn equal the whole conversation's, rendered at once."""
    model, processor = load("qwen3_vl")
    exam = make_exam("cells", (3, 3), 2, seed=0, number=0)
    seen: list[torch.Tensor] = []
    stock = model.generate
    model.generate = lambda **kwargs: (seen.append(kwargs["input_ids"]), stock(**kwargs))[1]
    base = RaincheckConfig(selector="random", completion="lazy")
    asked = [Asked(ask.question, ask.truth, 2) for ask in exam.asked]
    answers = Script(processor, exam.board.image(), asked).run(model, "full", base)
    text = processor.tokenizer.decode(seen[1][0])
    assert text.startswith(processor.tokenizer.decode(seen[0][0]) + answers[0].said)
    end = "<|im_end|>\n<|im_start|>user\n"
    assert text.endswith(f"{end}{asked[1].question}<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_end|>") == 3


def test_settings_refuse_before_anything_runs() -> None:
    for wrong, message in [
        ({"selectors": ("no_such",)}, "unknown selector"),
        ({"models": ("no/such",)}, "no checkpoint"),
        ({"turns": 65}, "1 to 64"),
        ({"read_turns": 22, "read_size": (4, 5)}, "1 to 21"),
        ({"boards": -1}, "boards"),
        ({"retention": 1.5}, "retention"),
        ({"only": ("halfway",)}, "halfway"),
        ({"device": "cuda:99"}, "not there"),
    ]:
        with pytest.raises(ValueError, match=message):
            Settings(**wrong)  # type: ignore[arg-type]


def test_checkpoints_are_told_apart(tmp_path: Path) -> None:
    assert [is_recurrent(name) for name in NAMES] == [False, True]
    assert fingerprint("qwen3_vl") != fingerprint("qwen3_5")
    assert fingerprint(str(locate("qwen3_vl"))) == fingerprint("qwen3_vl")
    with pytest.raises(ValueError, match="no checkpoint"):
        locate(str(tmp_path))
