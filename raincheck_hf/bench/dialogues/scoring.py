"""Scores that need no judge."""

from __future__ import annotations

import unicodedata

from raincheck_hf.bench.dialogues.format import Turn
from raincheck_hf.bench.tasks import marks


def own_score(turn: Turn, said: str) -> float | None:
    """The score of an answer, 0 to 1; None where it is not scored or only a judge can tell.

    Args:
        turn: The question, with its reference.
        said: The answer.
    """
    if turn.scoring == "exact":
        return float(plain(said) == plain(turn.reference or ""))
    if turn.scoring == "positions":
        right = marks(said, turn.reference or "")
        return sum(right) / len(right)
    return None


def plain(text: str) -> str:
    """An answer without what does not count: case, width, spacing, a full stop at its end."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.removesuffix(".").rstrip()
