"""The board with selected, restored and pending cells, before, during and after. PIL alone."""

from __future__ import annotations

from collections.abc import Iterable

from PIL import Image, ImageDraw, ImageFont

from raincheck_hf.demo.conversation import Held
from raincheck_hf.tiny.boards import CELL

_SCALE = 2
_EDGE = CELL * _SCALE
_GAP = 28
_INK, _PAPER = (32, 36, 44), (250, 250, 247)
_COLOURS = {"selected": (47, 111, 208), "restored": (32, 148, 92), "pending": (196, 120, 40)}
_MEANING = {
    "selected": "selected: in the first prefill",
    "restored": "restored since",
    "pending": "pending: not seen yet",
}


def draw_conversation(held: Held, title: str) -> Image.Image:
    """Three panels of one conversation's first turn.

    Args:
        held: The conversation.
        title: Written above.
    """
    step, part = _halfway(held)
    total = len(held.deferred)
    panels = [
        ("before: after the first prefill", 0),
        (f"during: {step} tokens of the answer consumed", part),
        ("after: before the next question is read", total),
    ]
    rows, cols = held.board.shape
    width = len(panels) * (cols * _EDGE + _GAP) + _GAP
    height = rows * _EDGE + 190
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)
    shown = f'{title}: "{held.asked[0].question}"'
    pen.text((_GAP, 22), shown, fill=_INK, font=ImageFont.load_default(26))
    for at, (caption, restored) in enumerate(panels):
        left = _GAP + at * (cols * _EDGE + _GAP)
        states = _states(held, restored)
        counts = f"{states.count('pending')} of {rows * cols} pending"
        pen.text((left, 66), caption, fill=_INK, font=ImageFont.load_default(20))
        pen.text((left, 92), counts, fill=_INK, font=ImageFont.load_default(17))
        sheet.paste(_panel(held, states), (left, 120))
    _legend(pen, _GAP, height - 46)
    return sheet


def _halfway(held: Held) -> tuple[int, int]:
    """The first step after which half of D or more is back, and how much is back then.

    An answer that restores less is shown at its end.
    """
    steps = held.report.restored_per_step
    for step in range(1, len(steps) + 1):
        if 2 * held.restored_after(step) >= len(held.deferred):
            return step, held.restored_after(step)
    return len(steps), held.restored_after(len(steps))


def _states(held: Held, restored: int) -> list[str]:
    """A cell's state, in reading order, once so many deferred cells are restored."""
    rows, cols = held.board.shape
    states = ["pending"] * (rows * cols)
    for cells, name in ((held.selected, "selected"), (held.deferred[:restored], "restored")):
        for cell in cells.tolist():
            states[cell] = name
    return states


def _panel(held: Held, states: Iterable[str]) -> Image.Image:
    rows, cols = held.board.shape
    size = (cols * _EDGE, rows * _EDGE)
    board = held.board.image().resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(board)
    for at, state in enumerate(states):
        row, col = divmod(at, cols)
        _mark(board, pen, (col * _EDGE, row * _EDGE), state)
    return board


def _mark(
    board: Image.Image, pen: ImageDraw.ImageDraw, corner: tuple[int, int], state: str
) -> None:
    """Frame a cell; a pending one is also veiled and struck through, for prints in grey."""
    left, top = corner
    box = (left, top, left + _EDGE - 1, top + _EDGE - 1)
    colour = _COLOURS[state]
    if state == "pending":
        cell = board.crop((left, top, left + _EDGE, top + _EDGE))
        veil = Image.new("RGB", cell.size, (214, 208, 198))
        board.paste(Image.blend(cell, veil, 0.72), (left, top))
        pen.line((left + 5, top + _EDGE - 6, left + _EDGE - 6, top + 5), fill=colour, width=2)
    pen.rectangle(box, outline=_PAPER, width=1)
    inner = (box[0] + 2, box[1] + 2, box[2] - 2, box[3] - 2)
    pen.rectangle(inner, outline=colour, width=5 if state == "selected" else 3)


def _legend(pen: ImageDraw.ImageDraw, left: int, top: int) -> None:
    font = ImageFont.load_default(19)
    for state, meaning in _MEANING.items():
        fill = (214, 208, 198) if state == "pending" else (0, 0, 0)
        box = (left, top, left + 25, top + 25)
        pen.rectangle(
            box, fill=fill, outline=_COLOURS[state], width=5 if state == "selected" else 3
        )
        if state == "pending":
            pen.line((left + 3, top + 22, left + 22, top + 3), fill=_COLOURS[state], width=2)
        pen.text((left + 34, top + 1), meaning, fill=_INK, font=font)
        left += 34 + int(pen.textlength(meaning, font=font)) + 40
