"""The command line: what it prints, writes and refuses."""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.utils import logging

from raincheck_hf.bench import environment
from raincheck_hf.cli import main
from raincheck_hf.demo.chat import Chat
from raincheck_hf.demo.conversation import Held, transcript
from raincheck_hf.demo.picture import draw_conversation
from raincheck_hf.report import RaincheckReport
from raincheck_hf.tiny import make_board


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Commands own their process and set it up; here it is the tests'."""
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    yield
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


def test_env_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    names = {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()}
    wanted = {"python", "system", "torch", "triton", "transformers", "accelerate", "raincheck_hf"}
    assert wanted | {"cpu", "attention"} <= names


def test_env_survives_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise OSError("not here")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(environment.subprocess, "run", missing)
    monkeypatch.setattr(environment.Path, "read_text", missing)
    monkeypatch.setattr(environment, "version", lambda name: "not installed")
    block = environment.block()
    assert "torch cannot be imported" in block and "not a git checkout" in block


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "required"),
        ("fly", "fly"),
        ("bench", "required"),
        ("demo --boards 0", "1 or more"),
        ("demo --selector nothing", "known: "),
        ("bench quality --arch gpt", "qwen3_vl"),
        ("bench quality --selectors nothing", "known: "),
        ("bench quality --boards many", "whole number"),
        ("bench quality --retention 0", "retention"),
        ("bench quality --turns 99", "1 to 64"),
        ("bench quality --model no/such/folder", "no checkpoint"),
        ("bench quality --device abacus", "abacus"),
        ("chat --model no/such/folder", "no checkpoint"),
        ("chat --dtype int3", "int3"),
    ],
)
def test_bad_arguments_are_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words.split())
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


def test_quality_writes_rows_and_prints_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "quality.jsonl"
    words = "bench quality --arch qwen3_vl --selectors uniform --boards 1 --turns 2 --size 3 4"
    assert main([*words.split(), "--reads", "0", "--processes", "1", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["way"] for row in rows] == ["full", "hard", "raincheck"]
    printed = capsys.readouterr().out
    assert "cells: 1 boards of 3×4" in printed and "recovery" in printed
    assert out.with_suffix(".summary.json").exists()


def test_demo_shows_a_table_a_conversation_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--boards", "1", "--selector", "random", "--out", str(tmp_path / "new")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for part in ("cells, qwen3_vl", "cells, qwen3_5", "Read the board.", "truth", "raincheck"):
        assert part in printed
    for name in ("board.png", "restoration.png"):
        path = tmp_path / "new" / name
        assert str(path) in printed
        with Image.open(path) as picture:
            picture.load()


@pytest.fixture
def held() -> Held:
    """A conversation about 2×3 cells in which one of three deferred cells came back in time."""
    board = make_board(2, 3, 0)
    report = RaincheckReport(n_visual=6, n_selected=3, n_deferred=3, restored_per_step=[0, 1, 0])
    asked = (type("Asked", (), {"question": "Read the board.", "truth": "123456"})(),)
    said = {"hard": ["1x3"], "raincheck": ["123456"]}
    return Held(board, asked, said, report, np.array([0, 2, 4]), np.array([1, 3, 5]))


def test_transcript_marks_what_is_wrong(held: Held) -> None:
    lines = transcript(held).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("hard"))
    assert lines[at + 1].split() == ["^", "^^^"]
    assert lines[at + 2].strip() == "2 of 6 right"
    assert lines[-1].strip() == "6 of 6 right"


def test_picture_shows_each_cell_in_its_state(held: Held) -> None:
    sheet = np.asarray(draw_conversation(held, "test"))
    edge, gap, top = 64, 28, 120
    blue, green, orange = (47, 111, 208), (32, 148, 92), (196, 120, 40)
    states = {0: blue, 2: blue, 4: blue, 1: orange, 3: orange, 5: orange}
    for panel, restored in enumerate(([], [1], [1, 3, 5])):
        for cell, colour in (states | dict.fromkeys(restored, green)).items():
            x = gap + panel * (3 * edge + gap) + (cell % 3) * edge
            y = top + (cell // 3) * edge
            assert tuple(sheet[y + edge // 2, x + 3]) == colour


class Fake:
    """A session that answers in two pieces."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.report: RaincheckReport | None = None

    def stream(self, text: str, images: Any = (), **kwargs: Any) -> Iterator[str]:
        if text == "bad":
            raise ValueError("no good")
        self.asked.append((text, len(images)))
        self.report = RaincheckReport(n_visual=7)
        yield from ("fo", "ur")

    def reset(self) -> None:
        self.asked.append(("reset", 0))


def test_chat_shows_pictures_once_and_survives_errors(tmp_path: Path) -> None:
    path = tmp_path / "two words.png"
    make_board(1, 2, 0).image().save(path)
    session, said = Fake(), []
    lines = [
        "/report", f"/image {path}", "/image missing.png", "bad", "What?", "And?",
        "/report", "/reset", "/what", "/quit", "not read",
    ]  # fmt: skip
    Chat(session, said.append).run(iter(lines))
    assert session.asked == [("What?", 1), ("And?", 0), ("reset", 0)]
    text = "".join(said)
    for part in ("nothing was asked", "64×32", "missing.png", "no good", "four\n", "Type a"):
        assert part in text


def test_chat_talks_to_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "board.png"
    make_board(8, 8, 0).image().save(path)
    lines = iter([f"/image {path}", "What is in D5?", "What is in A1?", "/report"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", typed)
    assert main(["chat", "--model", "qwen3_vl", "--max-new-tokens", "2"]) == 0
    assert "multimodal tokens" in capsys.readouterr().out
