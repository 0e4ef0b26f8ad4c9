"""What the evaluation harnesses share: flat arguments, figures, and a dialogue on one cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_boards import PRUNED, board_of, questions_of

import raincheck_hf
from raincheck_hf import RaincheckConfig, RaincheckReport, RaincheckSession
from raincheck_hf.harness.dialogue import Dialogue
from raincheck_hf.harness.figures import figures_of, figures_of_rounds, mean
from raincheck_hf.harness.loading import load
from raincheck_hf.harness.options import FIELDS, config_of, without_next_turn
from raincheck_hf.tiny.boards import as_video, make_board


def user(*parts: Any) -> dict[str, Any]:
    """A message in which strings are text and everything else a picture."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "video", "video": part}
        if isinstance(part, list)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def test_harnesses_are_imported_in_their_own_files_only() -> None:
    root = Path(raincheck_hf.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"^\s*(from|import) (lmms_eval|vlmeval)\b", path.read_text("utf-8"), re.M)
    }
    own = ("lmms_eval", "manifest", "vlmeval")
    assert found == {f"harness/{name}.py" for name in own}


# -- flat arguments ---------------------------------------------------------------------------


def test_modes_are_configurations() -> None:
    assert config_of({}) == RaincheckConfig()
    assert config_of({"retention": 0.5, "seed": 3}, "raincheck") == RaincheckConfig(0.5, seed=3)
    assert config_of({"selector": "uniform"}, "full").retention == 1
    assert config_of({"retention": 0.2}, "hard") == RaincheckConfig(0.2, defer="never")
    assert config_of({"retention": 1}, "full").retention == 1
    assert set(FIELDS) == set(RaincheckConfig().to_dict())


def test_nothing_is_restored_behind_a_last_answer() -> None:
    assert without_next_turn(RaincheckConfig()).completion == "lazy"
    blocking = RaincheckConfig(completion="blocking")
    assert without_next_turn(blocking) == blocking


@pytest.mark.parametrize(
    ("fields", "mode", "message"),
    [
        ({}, "soft", "full, hard, raincheck"),
        ({"retention": 0.3}, "full", "mode=full means retention=1.0; got retention=0.3"),
        ({"defer": "decode"}, "hard", "mode=hard means defer=never"),
        ({"retention": 1.5}, "raincheck", "retention"),
        ({"selektor": "mmtok"}, "raincheck", "selektor"),
    ],
)
def test_flat_arguments_are_refused(fields: dict[str, Any], mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(fields, mode)


def test_an_attention_implementation_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="sdpa or eager"):
        load("no/such/model", attn_implementation="flash_attention_2")


# -- figures ----------------------------------------------------------------------------------


def test_figures_of_a_turn() -> None:
    report = RaincheckReport(
        n_visual=10, n_selected=2, n_deferred=8, restored_per_step=[0, 3, 3], ttft_ms=5.0,
        step_ms=[1.0, 2.0, 3.0],
    )  # fmt: skip
    figures = figures_of(report, input_tokens=20, output_tokens=4)
    assert figures["restored_fraction"] == 0.75 and figures["restored_in_answer"] == 6
    assert (figures["ttft_ms"], figures["tpot_ms"]) == (5.0, 2.0)
    nothing = figures_of(RaincheckReport(n_visual=4, n_selected=4), 9, 1)
    assert nothing["restored_fraction"] is None and nothing["tpot_ms"] is None
    json.dumps([figures, nothing])


def test_figures_of_rounds_weigh_what_they_average() -> None:
    rounds = [
        figures_of(RaincheckReport(n_deferred=9, restored_per_step=[9], ttft_ms=4.0,
                                   step_ms=[1.0]), 10, 2),
        figures_of(RaincheckReport(n_deferred=3, ttft_ms=2.0, step_ms=[5.0] * 3), 20, 4),
        figures_of(RaincheckReport(ttft_ms=3.0), 30, 1),
    ]  # fmt: skip
    figures = figures_of_rounds(rounds)
    assert figures["ttft_ms"] == 3.0
    assert figures["tpot_ms"] == (1 * 1 + 5 * 3) / 4
    assert figures["restored_fraction"] == 9 / 12
    assert (figures["input_tokens"], figures["output_tokens"]) == (30, 7)
    assert figures["rounds"] == rounds
    assert mean([None, 2.0], [3, 0]) is None


# -- a dialogue -------------------------------------------------------------------------------


def test_a_dialogue_answers_as_a_session_does(architecture: str) -> None:
    model, processor = load(architecture, "float32")
    config = RaincheckConfig(**PRUNED, completion="lazy")
    dialogue = Dialogue(model, processor, config)
    session = RaincheckSession(model, processor, config)
    board = board_of(0)
    for turn, (question, _) in enumerate(questions_of(board)):
        image = [] if turn else [board.image()]
        answer = dialogue.ask([user(*image, question)], max_new_tokens=12, do_sample=False)
        assert answer.text == session.ask(
            question, images=image, max_new_tokens=12, do_sample=False
        )
        if turn == 0:
            assert answer.figures["n_deferred"] == 44
            assert 0 < answer.figures["restored_in_answer"] < 44
    assert torch.equal(dialogue.cache.token_ids, session.cache.token_ids)
    assert dialogue.cache.pending == 0
    dialogue.close()
    session.close()


def test_pictures_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later turns bring text alone, another picture, and a video: each passes the tower once."""
    model, processor = load("qwen3_vl", "float32")
    handed: list[dict[str, int]] = []
    stock = model.generate

    def generate(**kwargs: Any) -> Any:
        grids = {name: len(grid) for name, grid in kwargs.items() if name.endswith("grid_thw")}
        handed.append(grids)
        return stock(**kwargs)

    monkeypatch.setattr(model, "generate", generate)
    patches: list[int] = []
    model.model.visual.register_forward_pre_hook(lambda module, args: patches.append(len(args[0])))
    first, second = board_of(0), board_of(1)
    video = as_video([make_board(4, 4, rng=n) for n in range(2)])
    dialogue = Dialogue(model, processor, RaincheckConfig(**PRUNED))
    for message in (
        user("Look: ", first.image(), first.ask_cell(4, 3).question),
        user(first.ask_cell(0, 0).question),
        user(second.image(), "Read row 1."),
        user(video, "Read row 1."),
        user("Read row 2."),
    ):
        dialogue.ask([message], max_new_tokens=4, do_sample=False)
    image, film = {"image_grid_thw": 1}, {"video_grid_thw": 1}
    assert handed == [image, {}, image, film, {}]
    assert len(patches) == 3 and patches[:2] == [4 * 64] * 2
    assert [one["role"] for one in dialogue.messages] == ["user", "assistant"] * 5
    dialogue.close()


def test_a_turn_that_breaks_off_leaves_the_dialogue_as_it_was() -> None:
    model, processor = load("qwen3_vl", "float32")
    board = board_of(0)
    (row, _), (cell, truth), *_ = questions_of(board)
    dialogue = Dialogue(model, processor, RaincheckConfig(**PRUNED))
    dialogue.ask([user(board.image(), row)], max_new_tokens=12, do_sample=False)
    before = list(dialogue.messages)
    with pytest.raises(ValueError, match="num_beams"):
        dialogue.ask([user(board_of(1).image(), cell)], max_new_tokens=4, num_beams=3)
    with pytest.raises(ValueError, match="user"):
        dialogue.ask([])
    with pytest.raises(ValueError, match="user"):
        dialogue.ask([{"role": "assistant", "content": "no"}])
    assert dialogue.messages == before
    assert dialogue.ask([user(cell)], max_new_tokens=4, do_sample=False).text == truth
    dialogue.close()


def test_a_dialogue_that_has_begun_elsewhere() -> None:
    """A system message, a question and somebody's answer come in at once."""
    model, processor = load("qwen3_vl", "float32")
    board = board_of(0)
    (row, said), (cell, truth), *_ = questions_of(board)
    dialogue = Dialogue(model, processor, RaincheckConfig(retention=1.0))
    earlier = [user(board.image(), row), {"role": "assistant", "content": said}]
    answer = dialogue.ask([*earlier, user(cell)], max_new_tokens=4, do_sample=False)
    assert answer.text == truth and len(dialogue.messages) == 4
    dialogue.close()
