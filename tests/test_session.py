"""RaincheckSession: conversations in text."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raincheck_hf import RaincheckConfig, RaincheckSession, tiny
from raincheck_hf.tiny.boards import Board, as_video, make_board

CONFIG = RaincheckConfig(selector="uniform", chunk_size=3, guard_tokens=1)


@pytest.fixture(scope="module")
def loaded(architecture: str) -> tuple[Any, Any]:
    return tiny.load(architecture)


@pytest.fixture
def session(loaded: tuple[Any, Any]) -> RaincheckSession:
    return RaincheckSession(*loaded, CONFIG)


@pytest.fixture(scope="module")
def board() -> Board:
    return make_board(8, 8, rng=3)


def test_three_turns_continue_exactly_what_was_said(session: Any, board: Board) -> None:
    session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    before = session.cache.token_ids
    assert session.ask("Read row 3.", max_new_tokens=12) == board.ask_row(2).answer
    assert session.ask("What is in A1?", max_new_tokens=3) == board.ask_cell(0, 0).answer
    now = session.cache.token_ids
    assert torch.equal(now[: len(before)], before)
    text = session.processor.tokenizer.decode(now)
    assert text.count("<|im_start|>user") == text.count("<|im_start|>assistant") == 3
    # Each answer's end token was generated, and stands there once.
    assert text.count("<|im_end|>") == 5
    assert [m["role"] for m in session.history] == ["user", "assistant"] * 3


def test_a_turn_equals_the_rendered_conversation(session: Any, board: Board) -> None:
    """What a session appends is what the template would have rendered."""
    session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    session.ask("Read row 3.", max_new_tokens=12)
    rendered = session.processor.apply_chat_template(session.history, tokenize=False)
    ids = session.processor(text=[rendered], images=[board.image()], return_tensors="pt")[
        "input_ids"
    ][0]
    consumed = session.cache.token_ids
    assert torch.equal(ids[: len(consumed)], consumed)


def test_an_answer_that_was_cut_is_continued(session: Any, board: Board) -> None:
    session.ask("Read the board.", images=[board.image()], max_new_tokens=5, min_new_tokens=5)
    cut = session.history[-1]["content"]
    assert session.ask("Read row 3.", max_new_tokens=12) == board.ask_row(2).answer
    text = session.processor.tokenizer.decode(session.cache.token_ids)
    assert f"{cut}<|im_end|>\n<|im_start|>user\nRead row 3." in text


def test_streamed_pieces_join_to_the_answer(loaded: Any, board: Board) -> None:
    asked, streamed = RaincheckSession(*loaded, CONFIG), RaincheckSession(*loaded, CONFIG)
    answer = asked.ask("Read row 1.", images=[board.image()], max_new_tokens=12)
    pieces = list(streamed.stream("Read row 1.", images=[board.image()], max_new_tokens=12))
    assert "".join(pieces) == answer == streamed.history[-1]["content"]
    assert len(pieces) > 1


def test_a_reader_that_leaves_ends_the_answer(session: Any, board: Board) -> None:
    pieces = session.stream(
        "Read the board.", images=[board.image()], max_new_tokens=400, min_new_tokens=400
    )
    first = next(pieces)
    pieces.close()
    said = session.history[-1]["content"]
    assert said.startswith(first)
    assert len(said) < 300
    assert not [t for t in threading.enumerate() if t.name == "raincheck-stream"]
    assert session.ask("Read row 3.", max_new_tokens=12) == board.ask_row(2).answer


def test_an_error_in_a_stream_reaches_the_reader(session: Any, board: Board) -> None:
    def broken(ids: Any, scores: Any) -> Any:
        raise RuntimeError("broken processor")

    pieces = session.stream("Read row 1.", images=[board.image()], logits_processor=[broken])
    with pytest.raises(RuntimeError, match="broken processor"):
        list(pieces)
    assert session.history == []
    # Asked again, the turn starts over: nothing of the broken one is left.
    assert session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    assert session.ask("Read row 3.", max_new_tokens=12) == board.ask_row(2).answer
    text = session.processor.tokenizer.decode(session.cache.token_ids)
    assert text.count("<|im_start|>user") == 2


def test_a_turn_that_breaks_off_later_is_rewound_too(session: Any, board: Board) -> None:
    session.ask("Read the board.", images=[board.image()], max_new_tokens=5, min_new_tokens=5)
    ids = session.cache.token_ids

    calls: list[int] = []

    def interrupted(now: torch.Tensor, scores: Any) -> Any:
        calls.append(now.shape[1])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        session.ask("Read row 1.", logits_processor=[interrupted])
    assert torch.equal(session.cache.token_ids, ids)
    assert session.ask("Read row 3.", max_new_tokens=12) == board.ask_row(2).answer
    text = session.processor.tokenizer.decode(session.cache.token_ids)
    assert f"{session.history[1]['content']}<|im_end|>\n<|im_start|>user\nRead row 3." in text


def test_bad_input_leaves_the_conversation_as_it_was(session: Any, board: Board) -> None:
    session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    ids, history = session.cache.token_ids, list(session.history)
    for bad, error in (
        ({"text": 5}, TypeError),
        ({"text": "?", "images": board.image()}, TypeError),
        ({"text": "?", "images": ["/no/such/file.png"]}, ValueError),
        ({"text": "?", "num_beams": 2}, ValueError),
        ({"text": "?", "videos": ["a.mp4", as_video([board])]}, ValueError),
    ):
        with pytest.raises(error):
            session.ask(**bad)
        assert torch.equal(session.cache.token_ids, ids)
        assert session.history == history
    assert session.ask("Read row 3.", max_new_tokens=12) == board.ask_row(2).answer


def test_new_pictures_and_videos_in_later_turns(session: Any, board: Board) -> None:
    other = make_board(4, 4, rng=9)
    session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    session.ask("What is in B2?", images=[other.image()], max_new_tokens=3)
    session.ask("What is in B2 of frame 2?", videos=[as_video([other, other])], max_new_tokens=3)
    assert session.report.n_visual == 2 * 16
    assert [item.kind for item in session.cache.conversation.items] == ["image", "image", "video"]
    session.finish()
    assert session.cache.pending == 0


def test_fork_reset_and_close(session: Any, board: Board) -> None:
    session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    twin = session.fork()
    assert twin.ask("Read row 3.", max_new_tokens=12) == board.ask_row(2).answer
    assert len(session.history) == 2
    assert session.ask("Read row 4.", max_new_tokens=12) == board.ask_row(3).answer
    old = session.cache
    session.reset()
    assert old.closed
    assert session.history == []
    assert session.cache.get_seq_length() == 0
    assert session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    session.close()
    with pytest.raises(ValueError, match="closed"):
        session.ask("Read row 3.")


def test_a_system_message_opens_the_conversation(loaded: Any, board: Board) -> None:
    session = RaincheckSession(*loaded, CONFIG, system="Read digits.")
    session.ask("What is in D5?", images=[board.image()], max_new_tokens=3)
    session.ask("Read row 3.", max_new_tokens=12)
    text = session.processor.tokenizer.decode(session.cache.token_ids)
    assert text.startswith("<|im_start|>system\nRead digits.<|im_end|>\n<|im_start|>user\n")
    assert text.count("<|im_start|>system") == 1


def test_a_file_and_its_pictures_give_the_same_kind_of_input(session: Any, tmp_path: Any) -> None:
    av = pytest.importorskip("av", reason="video files are decoded by PyAV")
    frames = as_video([make_board(4, 4, rng=seed) for seed in range(3)])
    path = tmp_path / "boards.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=1)
        stream.width, stream.height = frames[0].size
        for frame in [*map(av.VideoFrame.from_image, frames), None]:
            file.mux(stream.encode(frame))
    session.ask("What is in B2 of frame 3?", videos=[str(path)], max_new_tokens=3)
    assert session.report.n_visual == 3 * 16
    text = session.processor.tokenizer.decode(session.cache.token_ids)
    assert "<4.5 seconds>" in text  # by the file's own frame rate


def test_a_photograph_is_made_to_fit(session: Any) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (1500, 2000, 3), np.uint8))
    session.ask("What is in D5?", images=[photo], max_new_tokens=3)
    assert 500 < session.report.n_visual <= 1024
