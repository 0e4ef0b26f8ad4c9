"""The demo's conversations: full, hard and raincheck on the same questions. No page code.

Each way is a session of its own with its own cache. They answer one after the other, so that one
way's work does not slow down another's figures; what is left to restore goes on in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_cells import Panel, blank, cell_states, panels
from chat_media import BadMedia, Medium, read_file
from chat_models import Models, is_tiny, most_pixels

from raincheck_hf import RaincheckConfig, RaincheckReport, RaincheckSession
from raincheck_hf.tiny import make_board

WAYS = ("full", "hard", "raincheck")
_POLL_SECONDS = 0.1


class Refused(ValueError):
    """What was asked for cannot be done now; the text is for the person who asked."""


@dataclass(frozen=True)
class Controls:
    """What can be set between two questions.

    Attributes:
        ways: Which ways answer.
        retention: As in RaincheckConfig; so are the next three.
        most_tokens: Most tokens an answer may have.
    """

    ways: tuple[str, ...] = WAYS
    retention: float = 0.3
    selector: str = "mmtok"
    chunk_size: int = 31
    guard_tokens: int = 16
    most_tokens: int = 256

    def config(self, way: str) -> RaincheckConfig:
        """The config that one way runs with.

        Raises:
            ValueError: A value is out of range.
        """
        config = RaincheckConfig(
            retention=self.retention,
            selector=self.selector,
            chunk_size=self.chunk_size,
            guard_tokens=self.guard_tokens,
        )
        changes: dict[str, Any] = {"full": {"retention": 1.0}, "hard": {"defer": "never"}}
        return config.replace(**changes.get(way, {}))


@dataclass
class Answer:
    """One way's answer to one question, filled as it comes.

    Attributes:
        state: ``"waiting"``, ``"writing"``, ``"done"``, ``"stopped"``, ``"skipped"``, ``"failed"``.
        text: What was said so far.
        error: Why it failed.
        report: The turn's figures, from the prefill on.
    """

    state: str = "waiting"
    text: str = ""
    error: str = ""
    report: RaincheckReport | None = None

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return 0 if self.report is None else len(self.report.restored_per_step) + 1

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token, waiting for an earlier turn's restoration included."""
        return self.report.ttft_ms if self.report else None

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None for answers of one token, and until the answer is over."""
        spent = self.report.tpot_ms if self.report else None
        return 1000 / spent if spent else None


@dataclass(frozen=True)
class Turn:
    """A question, what was shown with it, and the answers by way."""

    question: str
    media: tuple[Medium, ...]
    answers: dict[str, Answer]


class Lane:
    """One way's side of a conversation.

    A way that sits out a question is shown that question's pictures with its next one.
    """

    def __init__(self, way: str, session: RaincheckSession) -> None:
        self.way = way
        self.session = session
        self._owed: list[Medium] = []
        self._asked: _Asked | None = None
        self._seen: _Asked | None = None

    def owe(self, media: Sequence[Medium]) -> None:
        """Pictures to be shown with the next question."""
        self._owed += media

    def answer(self, text: str, controls: Controls, answer: Answer, stop: threading.Event) -> None:
        """Ask, and fill in the answer; whatever goes wrong is its error."""
        # Images go first in a message.
        media = sorted(self._owed, key=lambda medium: medium.kind == "video")
        self._owed = []
        self.session.config = config = controls.config(self.way)
        self._asked = _Asked(media, answer, config.drops, self.session.report)
        pieces: Any = self.session.stream(
            text,
            images=[medium.pictures[0] for medium in media if medium.kind == "image"],
            videos=[list(medium.pictures) for medium in media if medium.kind == "video"],
            max_new_tokens=controls.most_tokens,
        )
        answer.state = "writing"
        try:
            with closing(pieces):
                for piece in pieces:
                    answer.text += piece
                    if stop.is_set():
                        break
            answer.state = "stopped" if stop.is_set() else "done"
        except Exception as error:  # one way's trouble is told, and leaves the others alone
            answer.state = "failed"
            answer.error = _plain(error)
        self.follow()

    def follow(self) -> None:
        """Take notice of the turn's report, which is there once the prefill is done."""
        asked, report = self._asked, self.session.report
        if asked is None or asked.answer.report is not None or report is asked.before:
            return
        if asked.media:
            cache = self.session.cache
            merge = cache.adapter.merge(cache.model)
            items = cache.conversation.items[-len(asked.media) :]
            asked.grids = [(t, h // merge, w // merge) for t, h, w in (i.grid for i in items)]
            self._seen = asked
        asked.answer.report = report

    def panels(self) -> list[Panel]:
        """The newest pictures that this way has seen, with the state of every cell now."""
        seen = self._seen
        if seen is None or seen.answer.report is None:
            return []
        return panels(seen.media, seen.grids, cell_states(seen.answer.report, seen.drops))

    def close(self) -> None:
        """Free the cache; an answer under way ends with its next token."""
        self.session.close()


@dataclass
class _Asked:
    """A question that a lane was asked: what came with it, and the report that it found."""

    media: list[Medium]
    answer: Answer
    drops: bool
    before: RaincheckReport | None
    grids: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Conversation:
    """What one browser tab talks about.

    Attributes:
        models: Where models come from.
        model: The chosen one's name.
        turns: So far.
        attached: What will be shown with the next question.
    """

    models: Models
    model: str = ""
    turns: list[Turn] = field(default_factory=list)
    attached: list[Medium] = field(default_factory=list)
    _lanes: dict[str, Lane] = field(init=False, default_factory=dict)
    _stop: threading.Event = field(init=False, default_factory=threading.Event)
    _asking: threading.Lock = field(init=False, default_factory=threading.Lock)
    _boards: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.model = self.model or self.models.names[0]

    @property
    def busy(self) -> bool:
        """Whether an answer is being written."""
        return self._asking.locked()

    @property
    def pending(self) -> int:
        """Deferred tokens that will still be restored."""
        return sum(lane.session.cache.pending for lane in list(self._lanes.values()))

    def attach(self, paths: Sequence[str | Path]) -> list[str]:
        """Read uploads for the next question.

        Returns:
            A message for each file that cannot be used.
        """
        _, processor = self.models.get(self.model)
        troubles: list[str] = []
        media: list[Medium] = []
        for path in paths:
            try:
                media.append(read_file(path, most_pixels(processor)))
            except BadMedia as error:
                troubles.append(str(error))
        if media:  # one's own pictures take the place of the demo's
            kept = [medium for medium in self.attached if not medium.sample]
            self.attached = [*kept, *media]
        return troubles

    def attach_board(self, rows: int = 8, columns: int = 8) -> None:
        """Draw a board of handwritten digits for the next question; small models read these."""
        self._boards += 1
        board = make_board(rows, columns, self._boards)
        name = f"board {self._boards}"
        self.attached = [Medium(name, "image", [board.image()], sample=True)]

    def detach(self) -> None:
        """Show nothing with the next question."""
        self.attached = []

    def ask(self, text: str, controls: Controls) -> Iterator[None]:
        """Put a question to the chosen ways; yields whenever there may be news, and at the end.

        Raises:
            Refused: There is no question or no way, or an answer is being written.
            ValueError: A control is out of range.
        """
        text = text.strip()
        ways = [way for way in WAYS if way in controls.ways]
        if not text:
            raise Refused("Type a question first.")
        if not ways:
            raise Refused("Choose at least one way to answer.")
        for way in ways:
            controls.config(way)
        if not self._asking.acquire(blocking=False):
            raise Refused("An answer is being written; wait for it, or stop it.")
        try:
            self._stop.clear()
            lanes = self._open_lanes()
            turn = Turn(text, tuple(self.attached), {way: Answer() for way in ways})
            self.turns.append(turn)
            self.attached = []
            for lane in lanes.values():
                lane.owe(turn.media)
            yield from self._run(turn, [lanes[way] for way in ways], controls)
        finally:
            self._asking.release()

    def stop(self) -> None:
        """End the answer under way after its next token; ways still waiting skip the question."""
        self._stop.set()

    def clear(self, model: str | None = None) -> None:
        """Begin anew, perhaps with another model."""
        self.stop()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        self.turns, self.attached = [], []
        self.model = model or self.model

    def panels(self, way: str) -> list[Panel]:
        """What a way has seen of the newest pictures."""
        lane = self._lanes.get(way)
        seen = lane.panels() if lane else []
        return seen or [panel for medium in self.attached for panel in blank(medium)]

    def offers_boards(self) -> bool:
        """Whether the model reads the demo's boards."""
        return is_tiny(self.model)

    def _open_lanes(self) -> dict[str, Lane]:
        if not self._lanes:
            loaded = self.models.get(self.model)
            self._lanes = {way: Lane(way, RaincheckSession(*loaded)) for way in WAYS}
        return self._lanes

    def _run(self, turn: Turn, lanes: list[Lane], controls: Controls) -> Iterator[None]:
        """Let the lanes answer in a thread, so that the page can follow between two tokens."""

        def work() -> None:
            for lane in lanes:
                answer = turn.answers[lane.way]
                if self._stop.is_set():
                    answer.state = "skipped"
                else:
                    lane.answer(turn.question, controls, answer, self._stop)

        worker = threading.Thread(target=work, name="chat-answer", daemon=True)
        worker.start()
        try:
            while worker.is_alive():
                for lane in lanes:
                    lane.follow()
                yield
                worker.join(_POLL_SECONDS)
        finally:
            if worker.is_alive():  # the reader left
                self.stop()
                worker.join()
        yield


class Conversations:
    """One conversation a browser tab."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._held: dict[str, Conversation] = {}
        self._change = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, tab: str) -> Conversation:
        """A tab's conversation, begun where there is none."""
        with self._change:
            return self._held.setdefault(tab, Conversation(self._models))

    def close(self, tab: str) -> None:
        """Free a tab's conversation; harmless where there is none."""
        with self._change:
            conversation = self._held.pop(tab, None)
        if conversation is not None:
            conversation.clear()


def _plain(error: Exception) -> str:
    """An error as a sentence for the page."""
    told = str(error) or type(error).__name__
    return told if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {told}"
