"""Conversations to learn from.

A lesson is one conversation plan, filled with different boards and questions for every row of the
batch. As all rows follow one plan, they have the same length and the same token positions, and
nothing is padded. The text is the chat template's, token for token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from raincheck_hf.tiny import boards
from raincheck_hf.tiny.processing import TEMPORAL

IGNORE = -100


@dataclass(frozen=True)
class Turn:
    """One question and answer.

    Attributes:
        kind: `"cell"`, `"row"`, `"column"` or `"board"`.
        target: which board, counted from 0, is asked about.
        shown: how many new boards this turn brings.
        named: whether the question names the board (`of board 2`).
        place: where new boards stand: `"before"` or `"after"` the question, or in the
            `"answer"`, ahead of its text.
    """

    kind: str
    target: int = 0
    shown: int = 0
    named: bool = False
    place: str = "before"


@dataclass(frozen=True)
class Plan:
    """A conversation about boards of one size; as a video, all boards come in its first turn.

    Attributes:
        rows: R of every board.
        cols: C of every board.
        turns: the questions, in order.
        video_fps: pictures a second, if the boards are frames of a video.
        system: whether a system message comes first.
        shuffled: whether visual tokens change places, each keeping its position.
        late: whether a random part of the first turn's visual tokens comes only after the question
            or in the midst of the answer, keeping their positions. What an answer token could not
            have seen is not asked of it.
    """

    rows: int
    cols: int
    turns: tuple[Turn, ...]
    video_fps: float | None = None
    system: bool = False
    shuffled: bool = False
    late: bool = False

    @property
    def boards(self) -> int:
        """How many boards are shown."""
        return sum(turn.shown for turn in self.turns)


@dataclass
class Lesson:
    """A batch of filled-in conversations. V visual tokens and A answer tokens a row.

    Attributes:
        plan: what all rows have in common.
        ids: int64 [B, L].
        cells: int64 [B, V], which picture stands behind each visual token.
        visual: int64 [V], columns of the visual tokens in `ids`.
        sequence: int64 [L], the order in which the text layers see the columns.
        names: int64 [V], the token that names each visual token's cell.
        answer_at: int64 [A], columns whose next token is supervised.
        answers: int64 [B, A], those next tokens.
        pointers: int64 [B, A], the name of the cell that token reads, or `IGNORE`.
        asked_at: int64 [Q], columns where a question about one cell is complete.
        asked: int64 [B, Q], the digits that answer those.
        kinds: for each answer token, what kind of turn it belongs to.
    """

    plan: Plan
    ids: torch.Tensor
    cells: torch.Tensor
    visual: torch.Tensor
    sequence: torch.Tensor
    names: torch.Tensor
    answer_at: torch.Tensor
    answers: torch.Tensor
    pointers: torch.Tensor
    asked_at: torch.Tensor
    asked: torch.Tensor
    kinds: list[str] = field(default_factory=list)

    def to(self, device: torch.device) -> Lesson:
        """The same lesson with its tensors on `device`."""
        return Lesson(
            **{
                key: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
                for key, value in vars(self).items()
            }
        )


class Teacher:
    """Fills plans with boards.

    Args:
        tokenizer: the small models' tokenizer.
        split: which pictures to draw from.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, split: boards.Split = "train"):
        self._tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}
        low, high = 0, boards.FIRST_HELD_OUT
        if split == "held_out":
            low, high = high, len(boards.digits()[1])
        self._pool = (low, high)
        self._digit = np.array([self._piece(str(digit))[0] for digit in range(10)])
        side = boards.MAX_SIDE
        self._address = np.array(
            [[self._piece(boards.address(r, c))[0] for c in range(side)] for r in range(side)]
        )
        self._row = np.array([self._piece(f"row {r + 1}")[0] for r in range(side)])
        self._column = np.array(
            [self._piece(f"column {boards.column_letter(c)}")[0] for c in range(side)]
        )
        self._end = self._piece("<|im_end|>")[0]
        self._image, self._video = self._piece("<|image_pad|>"), self._piece("<|video_pad|>")

    def fill(self, plan: Plan, batch: int, rng: np.random.Generator) -> Lesson:
        """Draw boards and questions for `batch` rows."""
        rows, cols = plan.rows, plan.cols
        cells = rng.integers(*self._pool, size=(batch, plan.boards, rows, cols))
        labels = boards.digits()[1][cells]
        names = self._address[:rows, :cols].ravel()
        script = _Script(batch)
        if plan.system:
            script.say(self._piece("<|im_start|>system\nRead the board.<|im_end|>\n"))
        seen = 0
        for turn in plan.turns:
            views = [self._view(plan, seen + k) for k in range(turn.shown)]
            if plan.video_fps is not None and views:
                views = [self._piece("<|vision_start|>"), *views, self._piece("<|vision_end|>")]
            seen += turn.shown
            script.say(self._piece("<|im_start|>user\n"))
            if turn.place == "before":
                script.say(*views)
            cell = self._ask(script, plan, turn, labels[:, turn.target], rng)
            reads = cell + turn.target * rows * cols
            if turn.place == "after":
                script.say(*views)
            script.say(self._piece("<|im_end|>\n<|im_start|>assistant\n"))
            if turn.place == "answer":
                script.say(*views)
            flat = labels[:, turn.target].reshape(batch, -1)
            digits = self._digit[np.take_along_axis(flat, cell, axis=1)]
            script.answer(digits, reads, self._end, turn.kind)
            script.say(self._piece("\n"))
        pads = [*self._image, *self._video]
        lesson = script.lesson(plan, cells.reshape(batch, -1), np.tile(names, seen), pads)
        return reordered(lesson, script.reads(), rng) if plan.shuffled or plan.late else lesson

    def _ask(self, script, plan, turn, labels, rng) -> np.ndarray:
        """Write a question; return the flat cells it reads, [B, N], in order."""
        batch, rows, cols = labels.shape
        grid = np.arange(rows * cols).reshape(rows, cols)
        row, col = rng.integers(rows, size=batch), rng.integers(cols, size=batch)
        if turn.kind == "cell":
            script.say(self._piece("What is in "))
            script.vary(self._address[row, col])
            cell, close = grid[row, col][:, None], "?"
        elif turn.kind == "row":
            script.say(self._piece("Read "))
            script.vary(self._row[row])
            cell, close = grid[row], "."
        elif turn.kind == "column":
            script.say(self._piece("Read "))
            script.vary(self._column[col])
            cell, close = grid[:, col].T, "."
        else:
            script.say(self._piece(boards.BOARD_QUESTION))
            cell, close = np.broadcast_to(grid.ravel(), (batch, grid.size)), ""
        if turn.named:
            kind = "board" if plan.video_fps is None else "frame"
            script.say(self._piece(" of "), self._piece(f"{kind} {turn.target + 1}"))
        if turn.kind == "cell":
            digits = np.take_along_axis(labels.reshape(batch, -1), cell, axis=1)
            script.asked(self._digit[digits[:, 0]], cell[:, 0] + turn.target * rows * cols)
        if close:
            script.say(self._piece(close))
        return cell

    def _view(self, plan: Plan, number: int) -> list[int]:
        stamp = ""
        if plan.video_fps is not None:
            first = number * TEMPORAL / plan.video_fps
            last = (number * TEMPORAL + TEMPORAL - 1) / plan.video_fps
            stamp = f"<{(first + last) / 2:.1f} seconds>"
        pad = (self._image if plan.video_fps is None else self._video) * (plan.rows * plan.cols)
        return [*self._piece(stamp + "<|vision_start|>"), *pad, *self._piece("<|vision_end|>")]

    def _piece(self, text: str) -> list[int]:
        if text not in self._pieces:
            self._pieces[text] = self._tokenizer(text, add_special_tokens=False).input_ids
        return self._pieces[text]


class _Script:
    """Collects the columns of a lesson."""

    def __init__(self, batch: int):
        self._batch = batch
        self._columns: list[int | np.ndarray] = []
        self._answers: list[tuple[int, np.ndarray, np.ndarray, str]] = []
        self._asked: list[tuple[int, np.ndarray, np.ndarray]] = []

    def say(self, *pieces: list[int]) -> None:
        """Append tokens that all rows share."""
        for piece in pieces:
            self._columns.extend(piece)

    def vary(self, tokens: np.ndarray) -> None:
        """Append one column that differs from row to row, [B]."""
        self._columns.append(tokens)

    def asked(self, digits: np.ndarray, reads: np.ndarray) -> None:
        """Note that the question about a cell is complete with the last column."""
        self._asked.append((len(self._columns) - 1, digits, reads))

    def answer(self, tokens: np.ndarray, reads: np.ndarray, end: int, kind: str) -> None:
        """Append an answer, [B, N], which reads those visual tokens, and its end."""
        for token, read in zip(tokens.T, reads.T, strict=True):
            self._answers.append((len(self._columns) - 1, token, read, kind))
            self._columns.append(token)
        nothing = np.full(self._batch, IGNORE)
        self._answers.append((len(self._columns) - 1, np.full(self._batch, end), nothing, "end"))
        self._columns.append(end)

    def reads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which visual token each answer token, [B, A], and each question, [B, Q], needs."""
        return _stacked([a[2] for a in self._answers]), _stacked([a[2] for a in self._asked])

    def lesson(self, plan: Plan, cells: np.ndarray, names: np.ndarray, pads: list[int]) -> Lesson:
        """Stack the columns."""
        ids = np.empty((self._batch, len(self._columns)), dtype=np.int64)
        for at, column in enumerate(self._columns):
            ids[:, at] = column
        names, reads = torch.from_numpy(names), self.reads()[0]
        return Lesson(
            plan=plan,
            ids=torch.from_numpy(ids),
            cells=torch.from_numpy(cells),
            visual=torch.from_numpy(np.flatnonzero(np.isin(ids[0], pads))),
            sequence=torch.arange(ids.shape[1]),
            names=names,
            answer_at=torch.tensor([a[0] for a in self._answers]),
            answers=_stacked([a[1] for a in self._answers]),
            pointers=torch.where(reads == IGNORE, IGNORE, names[reads.clamp(min=0)]),
            asked_at=torch.tensor([a[0] for a in self._asked], dtype=torch.long),
            asked=_stacked([a[1] for a in self._asked]).view(self._batch, -1),
            kinds=[a[3] for a in self._answers],
        )


def reordered(
    lesson: Lesson, reads: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator
) -> Lesson:
    """Show a lesson's visual tokens in another order, as its plan says.

    Args:
        lesson: in the order of the text.
        reads: which visual token each answer token and each question needs.
        rng: where the order comes from.
    """
    plan, visual, sequence = lesson.plan, lesson.visual.numpy(), lesson.sequence.numpy().copy()
    if plan.shuffled:
        sequence[visual] = rng.permutation(visual)
    if plan.late:
        ask = int(lesson.answer_at[0]) + 1
        first = next(at for at, kind in enumerate(lesson.kinds) if kind == "end")
        cut = ask + (0 if rng.random() < 0.6 else int(rng.integers(0, first // 2 + 1)))
        early = sequence[:cut]
        waits = np.isin(early, visual) & (rng.random(cut) < rng.uniform(0.3, 0.8))
        sequence = np.concatenate([early[~waits], early[waits], sequence[cut:]])
    rank = torch.empty(len(sequence), dtype=torch.long)
    rank[torch.from_numpy(sequence)] = torch.arange(len(sequence))

    def unseen(need: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return (need != IGNORE) & (rank[lesson.visual[need.clamp(min=0)]] > rank[at])

    answers, asked = lesson.answers, lesson.asked
    return replace(
        lesson,
        sequence=torch.from_numpy(sequence),
        answers=answers.masked_fill(unseen(reads[0], lesson.answer_at), IGNORE),
        asked=asked.masked_fill(unseen(reads[1].view_as(asked), lesson.asked_at), IGNORE),
    )


def _stacked(columns: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(columns, 1)) if columns else torch.zeros(0, dtype=torch.long)
