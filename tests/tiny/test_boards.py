"""Boards are drawn from a seed, keep the split, and are asked in the agreed words."""

import numpy as np
import pytest
from PIL import Image

from raincheck_hf.tiny import boards
from raincheck_hf.tiny.boards import FIRST_HELD_OUT, Board, as_video, digits, make_board


def test_same_seed_same_board() -> None:
    one, same, other = make_board(8, 8, 3), make_board(8, 8, 3), make_board(8, 8, 4)
    assert np.array_equal(one.index, same.index)
    assert not np.array_equal(one.index, other.index)


def test_one_generator_draws_different_boards() -> None:
    rng = np.random.default_rng(0)
    assert not np.array_equal(make_board(4, 4, rng).index, make_board(4, 4, rng).index)


def test_held_out_pictures_are_never_trained_on() -> None:
    assert make_board(24, 24, 0, "train").index.max() < FIRST_HELD_OUT
    held_out = make_board(24, 24, 0)
    assert held_out.index.min() >= FIRST_HELD_OUT == 1500
    assert held_out.index.max() < len(digits()[1]) == 1797


def test_shipped_digits_are_the_ones_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    original = datasets.load_digits()
    assert np.array_equal(digits()[0], original.images)
    assert np.array_equal(digits()[1], original.target)


def test_a_picture_is_made_of_enlarged_digits() -> None:
    board = make_board(3, 5, 0)
    image = board.image()
    assert (image.mode, image.size) == ("RGB", (5 * 32, 3 * 32))
    pixels = np.asarray(image)
    assert (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 0] == pixels[..., 2]).all()
    grey = (digits()[0][board.index[2, 4]] * 255.0 / 16).round().astype(np.uint8)
    cell = Image.fromarray(grey).resize((32, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(pixels[64:96, 128:160, 0], np.asarray(cell))


def test_questions_word_for_word() -> None:
    board = Board(np.arange(FIRST_HELD_OUT, FIRST_HELD_OUT + 30).reshape(5, 6))
    labels = board.labels
    assert board.ask_cell(4, 3) == ("What is in D5?", str(labels[4, 3]))
    assert board.ask_cell(4, 3, "board 2").question == "What is in D5 of board 2?"
    assert board.ask_cell(4, 3, "frame 3").question == "What is in D5 of frame 3?"
    assert board.ask_row(2) == ("Read row 3.", "".join(map(str, labels[2])))
    assert board.ask_column(3) == ("Read column D.", "".join(map(str, labels[:, 3])))
    assert board.ask_board() == ("Read the board.", "".join(map(str, labels.ravel())))
    assert len(board.ask_board().answer) == 30


def test_each_board_is_two_pictures_of_a_video() -> None:
    shown = [make_board(2, 2, seed) for seed in range(3)]
    pictures = as_video(shown)
    assert len(pictures) == 6
    assert pictures[2].tobytes() == pictures[3].tobytes() == shown[1].image().tobytes()


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 24"):
        make_board(25, 3, 0)
    with pytest.raises(ValueError, match="train, held_out"):
        make_board(3, 3, 0, "test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no letter"):
        boards.column_letter(24)
