"""`raincheck-hf chat`: a conversation in a terminal, answers as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

HELP = """\
Type a question. Lines that begin with / are commands:
  /image PATH   show a picture with the next question (again for more pictures)
  /report       figures of the last answer
  /reset        begin a new conversation
  /help         this text
  /quit         leave; so does the end of the input"""


class Chat:
    """Reads lines, answers through a session.

    Args:
        session: A `RaincheckSession`.
        say: Prints a piece of text, as it is.
        most: Most tokens an answer may have.
    """

    def __init__(self, session: Any, say: Callable[[str], None], most: int = 512) -> None:
        self._session = session
        self._say = say
        self._most = most
        self._images: list[Image.Image] = []

    def run(self, lines: Iterator[str]) -> None:
        """Answer line after line until `/quit` or the end."""
        for line in lines:
            text = line.strip()
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(*text[1:].split(maxsplit=1))
            elif text:
                self._answer(text)

    def _command(self, name: str = "", rest: str = "") -> None:
        if name == "image":
            self._take(Path(rest).expanduser())
        elif name == "reset":
            self._session.reset()
            self._images = []
            self._say("a new conversation\n")
        elif name == "report":
            report = self._session.report
            self._say(f"{report.summary() if report else 'nothing was asked yet'}\n")
        else:
            self._say(f"{HELP}\n")

    def _take(self, path: Path) -> None:
        try:
            image = Image.open(path).convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            self._say(f"{path} cannot be shown: {error}\n")
            return
        self._images.append(image)
        width, height = image.size
        self._say(f"{width}×{height} pixels, shown with the next question\n")

    def _answer(self, text: str) -> None:
        try:
            pieces = self._session.stream(text, images=self._images, max_new_tokens=self._most)
            for piece in pieces:
                self._say(piece)
        except ValueError as error:  # nothing was lost; the next question may be a better one
            self._say(f"that did not work: {error}\n")
            return
        except KeyboardInterrupt:
            self._say(" [stopped]")
        self._images = []
        self._say("\n")


def prompt_lines(prompt: str = "> ") -> Iterator[str]:
    """What a person types, line by line, up to the end of the input."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            print()
            return
