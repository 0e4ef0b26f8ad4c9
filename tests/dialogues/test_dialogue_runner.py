"""Dialogues through the command: the same answers as bench quality, resumed after any stop."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raincheck_hf import enable_raincheck, tiny
from raincheck_hf.bench.dialogue import Script
from raincheck_hf.bench.dialogues.boards import board_dialogues
from raincheck_hf.bench.dialogues.format import Dialogue, Turn, write_dialogues
from raincheck_hf.bench.dialogues.plan import KEY, Plan
from raincheck_hf.bench.dialogues.runner import Runner
from raincheck_hf.bench.dialogues.summary import summarise, table, waiting
from raincheck_hf.bench.rows import RowFile
from raincheck_hf.bench.tasks import make_exam
from raincheck_hf.cli import main
from raincheck_hf.tiny import make_board

SIZE = (6, 6)
TIMES = ("ttft_ms", "tpot_ms")


@cache
def loaded(name: str) -> tuple[Any, Any]:
    model, processor = tiny.load(name)
    return enable_raincheck(model), processor


@pytest.fixture
def boards(tmp_path: Path) -> Path:
    path = tmp_path / "boards.jsonl"
    write_dialogues(path, board_dialogues(path, 2, turns=3, size=SIZE))
    return path


def plan_of(data: Path, **changes: Any) -> Plan:
    return Plan(**{"data": data, "selectors": ("random",), **changes})


def run(plan: Plan, out: Path, **changes: Any) -> list[dict[str, Any]]:
    file = RowFile(out, KEY)
    model, processor = loaded(plan.model)
    Runner(plan, model, processor, file, {"versions": {}, "commit": None}, **changes).run()
    return list(file)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name not in TIMES} for row in rows]


def test_boards_are_answered_as_in_bench_quality(
    boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    threads = torch.get_num_threads()
    try:
        command = ["bench", "dialogues", "--data", str(boards), "--selector", "random"]
        assert main([*command, "--mode", "full,hard,raincheck", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = list(RowFile(out, KEY))
    assert len(rows) == 2 * 3 * 3
    model, processor = loaded("qwen3_vl")
    plan = plan_of(boards)
    for number in range(2):
        exam = make_exam("cells", SIZE, 3, 0, number)
        script = Script(processor, exam.board.image(), exam.asked)
        for way in plan.ways:
            answers = script.run(model, way, plan.config("random", exam.draw))
            own = [
                row
                for row in rows
                if row["way"] == way and row["dialogue"] == f"cells-6x6-0-{number}"
            ]
            assert [row["said"] for row in own] == [answer.said for answer in answers]
            assert [row["reference"] for row in own] == [ask.truth for ask in exam.asked]
            first = answers[0].report
            assert own[0]["n_selected"] == first.n_selected
            assert own[0]["n_visual"] == first.n_visual == 36
    printed = capsys.readouterr().out
    assert "2 dialogues, 18 turns, 0 of them already" in printed
    assert "raincheck" in printed and "recovery [95 %]" in printed
    figures = json.loads(out.with_suffix(".summary.json").read_text())
    full = [one for one in figures if one["way"] == "full" and one["span"] == "all turns"]
    assert full[0]["score"]["point"] == pytest.approx(
        np.mean([row["score"] for row in rows if row["way"] == "full"])
    )


class Stopped(Exception):
    """Somebody pulled the plug."""


def test_a_stopped_run_goes_on_and_ends_with_the_same_rows(boards: Path, tmp_path: Path) -> None:
    plan = plan_of(boards, limit=1, ways=("full", "raincheck"))
    whole = run(plan, tmp_path / "whole.jsonl")
    out = tmp_path / "stopped.jsonl"
    count = 0

    def stop_at_the_fifth() -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise Stopped

    with pytest.raises(Stopped):
        run(plan, out, progress=stop_at_the_fifth)
    # The stop cut the last line short.
    kept = out.read_bytes().rstrip()[:-7]
    out.write_bytes(kept)
    assert RowFile(out, KEY).unreadable == 1 and len(RowFile(out, KEY)) == 4
    asked = []
    resumed = run(plan, out, progress=lambda: asked.append(1))
    assert without_times(resumed) == without_times(whole)
    assert len(asked) == 6
    assert out.read_bytes().startswith(kept)
    # Nothing is left to do, and nothing is written.
    before = out.read_bytes()
    run(plan, out)
    assert out.read_bytes() == before


def test_a_file_with_other_answers_is_not_gone_on_from(boards: Path, tmp_path: Path) -> None:
    plan = plan_of(boards, limit=1, ways=("full",))
    out = tmp_path / "rows.jsonl"
    rows = run(plan, out)
    changed = {**rows[0], "said": "something else"}
    out.write_text(json.dumps(changed) + "\n" + json.dumps(rows[1]) + "\n")
    with pytest.raises(RuntimeError, match="something else.*write to a new one"):
        run(plan, out)
    assert len(RowFile(out, KEY)) == 2


def test_other_settings_are_other_rows_in_the_same_file(boards: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run(plan_of(boards, limit=1, ways=("hard",)), out)
    rows = run(plan_of(boards, limit=1, ways=("hard",), retention=0.5), out)
    assert [row["retention"] for row in rows] == [0.3] * 3 + [0.5] * 3
    assert rows[0]["n_selected"] == 11 and rows[3]["n_selected"] == 18


def test_ways_with_other_selections_are_not_compared(
    boards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = iter(range(10))
    monkeypatch.setattr(Plan, "draw", lambda self, dialogue: next(seeds))
    with pytest.raises(RuntimeError, match="chose other tokens for 'raincheck'"):
        run(plan_of(boards, limit=1), tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_images_and_videos_in_several_turns(name: str, tmp_path: Path) -> None:
    """Selections of later turns are matched, too, whatever stood before them."""
    for number in range(4):
        make_board(3, 3, rng=number).image().save(tmp_path / f"{number}.png")
    still = ("2.png", "2.png", "3.png", "3.png")
    turns = (
        Turn("What is in A1 of board 2?", images=("0.png", "1.png"), max_new_tokens=2),
        Turn("What is in B2 of board 1?", max_new_tokens=3),
        Turn("What is in C3?", images=("2.png",), videos=(still, still[::-1]), max_new_tokens=2),
        Turn("What is in A2?", max_new_tokens=2),
    )
    data = tmp_path / "data.jsonl"
    write_dialogues(data, [Dialogue("mixed", turns, system="Answer by digits.")])
    rows = run(plan_of(data, model=name, selectors=("divprune",)), tmp_path / "rows.jsonl")
    assert [row["n_visual"] for row in rows[:4]] == [18, 0, 9 + 2 * 18, 0]
    hard = [row for row in rows if row["way"] == "hard"]
    assert [row["n_selected"] for row in hard] == [6, 0, 14, 0]
    for one, other in zip(hard, [row for row in rows if row["way"] == "raincheck"], strict=True):
        assert one["selection"] == other["selection"]
    # Nothing is to be scored.
    assert waiting(rows) == 0 and summarise(rows) == []


def test_a_video_file(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="writes and reads the video; comes with the demo extra")
    path = tmp_path / "boards.mp4"
    with av.open(str(path), "w") as film:
        stream = film.add_stream("mpeg4", rate=2)
        stream.width = stream.height = 96
        for number in range(4):
            picture = make_board(3, 3, rng=number).image()
            film.mux(stream.encode(av.VideoFrame.from_image(picture)))
        film.mux(stream.encode())
    data = tmp_path / "data.jsonl"
    turns = (Turn("What is in A1 of frame 2?", videos=("boards.mp4",), max_new_tokens=2),)
    write_dialogues(data, [Dialogue("film", turns)])
    rows = run(plan_of(data, selectors=("uniform",)), tmp_path / "rows.jsonl")
    assert {row["n_visual"] for row in rows} == {18}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mode", "full,easy"], "unknown mode(s) easy; known: full, hard, raincheck"),
        (["--mode", ","], "at least one mode"),
        (["--selector", "best"], "best"),
        (["--retention", "0"], "retention"),
        (["--chunk-size", "600"], "chunk_size"),
        (["--model", "qwen9"], "no checkpoint at 'qwen9'"),
        (["--mode", "uncorrected"], "no recurrent layers"),
        (["--device", "cuda:99"], "is not there"),
    ],
)
def test_bad_arguments_are_told_before_anything_runs(
    boards: Path, tmp_path: Path, arguments: list[str], says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "rows.jsonl"
    threads = torch.get_num_threads()
    try:
        code = main(["bench", "dialogues", "--data", str(boards), "--out", str(out), *arguments])
    finally:
        torch.set_num_threads(threads)
    assert code == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not out.exists()


def test_boards_are_exported_with_as_many_turns_as_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "long.jsonl"
    command = ["convert", "boards", "--size", "4", "4", "--out", str(out)]
    assert main([*command, "--boards", "2", "--turns", "13", "--task", "reading"]) == 0
    plan = plan_of(out)
    assert [len(dialogue.turns) for dialogue in plan.dialogues] == [13, 13]
    first = plan.dialogues[0].turns
    assert first[0].question == "Read the board." and len(first[0].reference or "") == 16
    assert len({turn.question for turn in first}) == 13
    picture = np.asarray(Image.open(tmp_path / first[0].images[0]))
    assert (picture == np.asarray(make_exam("reading", (4, 4), 13, 0, 0).board.image())).all()
    before = out.read_text()
    assert main([*command, "--boards", "1"]) == 2
    assert "there already" in capsys.readouterr().err
    assert out.read_text() == before
    out.unlink()
    assert main([*command, "--boards", "1"]) == 2
    assert "long.media is there already" in capsys.readouterr().err
    for arguments, says in (
        (["--turns", "17"], "1 to 16"),
        (["--task", "poems"], "cells, reading"),
    ):
        assert main(["convert", "boards", "--size", "4", "4", "--out", str(tmp_path / "n.jsonl"),
                     *arguments]) == 2  # fmt: skip
        assert says in capsys.readouterr().err


def row(dialogue: str, way: str, turn: int, score: float | None, **more: Any) -> dict[str, Any]:
    return {
        "dialogue": dialogue, "digest": "d", "model": "m", "weights": "w", "dtype": "float32",
        "device": "cpu", "seed": 0, "max_new_tokens": 9,
        "retention": 1.0 if way == "full" else 0.3, "chunk_size": None if way == "full" else 31,
        "guard_tokens": None if way == "full" else 16,
        "selector": None if way == "full" else "uniform", "way": way, "turn": turn, "turns": 2,
        "score": score, "scoring": "exact", "n_visual": 10, "n_selected": 3,
        "restored_in_answer": 7 if dialogue == "a" else 0, **more,
    }  # fmt: skip


def test_recovery_is_over_dialogues_that_every_way_has_answered() -> None:
    scores = {
        "full": {"a": (1, 1), "b": (1, 1), "c": (1, 1)},
        "hard": {"a": (0, 0), "b": (1, 0), "c": (1, 1)},
        "raincheck": {"a": (1, 1), "b": (1, 0.5)},
    }
    rows = [
        row(dialogue, way, turn, score)
        for way, own in scores.items()
        for dialogue, both in own.items()
        for turn, score in enumerate(both, 1)
    ]
    rows.append(row("c", "raincheck", 1, 1))  # its second turn is not there yet
    lines = {(line.way, line.span): line for line in summarise(rows)}
    assert {line.dialogues for line in lines.values()} == {2}
    assert lines["hard", "all turns"].score.point == 0.25
    line = lines["raincheck", "all turns"]
    assert line.by_turn == (1, 0.75)
    assert line.score.point == 0.875
    assert line.recovery is not None and line.recovery.point == pytest.approx(0.625 / 0.75)
    late = lines["raincheck", "turns 2+"].recovery
    assert late is not None and (late.point, late.low, late.high) == (0.75, 0.5, 1)
    assert line.late == 1
    assert "0.750 [0.500, 1.000]" in table(list(lines.values()))


def test_runs_with_other_settings_are_lines_of_their_own() -> None:
    rows = [
        row("a", way, turn, score, **more)
        for way, score, more in (
            ("full", 1, {}),
            ("hard", 0, {}),
            ("hard", 0.5, {"retention": 0.5}),
            ("raincheck", 0.75, {}),
            ("raincheck", 0.75, {"retention": 0.5}),
        )
        for turn in (1, 2)
    ]
    lines = [line for line in summarise(rows) if line.span == "all turns"]
    recovered = {line.settings["retention"]: line.recovery for line in lines if line.recovery}
    assert {at: one.point for at, one in recovered.items()} == {0.3: 0.75, 0.5: 0.5}
    text = [line.split() for line in table(lines).splitlines()]
    assert [cells[:3] for cells in text[3:]] == [
        ["-", "full", "1"],
        ["uniform", "hard", "0.3"],
        ["uniform", "hard", "0.5"],
        ["uniform", "raincheck", "0.3"],
        ["uniform", "raincheck", "0.5"],
    ]


def test_rows_hold_any_answer_and_survive_half_a_character(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    said = "one\u2028two\x85three\n…"
    first, second = row("a", "full", 1, 1, said=said), row("a", "full", 2, 1, said="é")
    RowFile(out, KEY).append([first, second])
    assert list(RowFile(out, KEY)) == [first, second]
    data = out.read_bytes()
    out.write_bytes(data[: data.rindex("é".encode()) + 1])
    file = RowFile(out, KEY)
    assert list(file) == [first] and file.unreadable == 1
    file.append([second])
    assert list(RowFile(out, KEY)) == [first, second]


def test_turns_without_a_score_are_left_out_and_told() -> None:
    rows = [
        row("a", "full", 1, 0.5),
        row("a", "full", 2, None, scoring="none"),
        row("b", "full", 1, 1.0),
        row("b", "full", 2, None, scoring="rating"),
    ]
    lines = summarise(rows)
    assert waiting(rows) == 1
    assert [(line.span, line.dialogues, line.score.point) for line in lines] == [
        ("turn 1", 1, 0.5),
        ("all turns", 1, 0.5),
    ]
