"""How far two runs of one conversation are apart: rounding, or more.

Greedy answers part for good at the first near-tie: what follows has another input and says nothing.
So the second run is made to say the first one's tokens, and every step can be compared. Rounding
leaves a small difference of about one size in all steps; a fault leaves a large one, or one that
starts at some step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor


@dataclass(frozen=True)
class Spoken:
    """What the turns of a conversation gave.

    Attributes:
        answers: Generated ids of each turn.
        logits: fp32 [tokens, vocabulary] of each turn, on the CPU, before anything was forced.
        ttft_ms: Of each turn; empty where it is not known.
        step_ms: Of each decode step, all turns; empty likewise.
        pending: Deferred tokens that each turn left to be restored after its answer.
    """

    answers: list[list[int]]
    logits: list[Tensor]
    ttft_ms: list[float]
    step_ms: list[float]
    pending: list[int]

    @property
    def tokens(self) -> list[int]:
        """Generated ids, all turns."""
        return [token for answer in self.answers for token in answer]


class Say(LogitsProcessor):
    """Makes a greedy answer be these tokens; the raw logits stay what they are."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = iter(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that leave the next token alone."""
        forced = torch.full_like(scores, -torch.inf)
        forced[:, next(self._left)] = 0
        return forced


def compare(one: Spoken, other: Spoken) -> dict[str, Any]:
    """Differences of two runs that said the same.

    Returns:
        ``bit_for_bit``; ``same_choices``, whether each would have said the same by itself; and
        ``turns``, what ``compare_turn`` says of each.

    Raises:
        ValueError: They did not say the same.
    """
    if one.answers != other.answers:
        raise ValueError("the runs said different tokens; make one say the other's")
    turns = [compare_turn(a, b) for a, b in zip(one.logits, other.logits, strict=True)]
    return {
        "bit_for_bit": all(map(torch.equal, one.logits, other.logits)),
        "same_choices": all(turn["first_different_token"] is None for turn in turns),
        "turns": turns,
    }


def compare_turn(one: Tensor, other: Tensor) -> dict[str, Any]:
    """Differences of the logits of one turn, fp32 [tokens, vocabulary].

    Returns:
        ``first_logits``, ``until_different`` (the steps up to the first different choice, that one
        included, which runs that choose for themselves share) and ``all_steps``: the largest
        relative L2 difference and the largest difference of one logit among these steps.
        ``median_relative_l2`` over all steps. ``first_different_token``: None, or the ``step``,
        the ``margin`` between the two best logits there in each run, and ``moved``, the largest
        difference of one logit there. ``different_tokens``: in how many steps the choice differs.
    """
    apart = (one - other).abs()
    relative = (one - other).norm(dim=1) / one.norm(dim=1)
    parted = (one.argmax(1) != other.argmax(1)).nonzero().flatten().tolist()

    def largest(stop: int) -> dict[str, float]:
        return {
            "relative_l2": float(relative[:stop].max()),
            "difference": float(apart[:stop].max()),
        }

    first = None
    if parted:
        step = parted[0]
        margins = [
            float(best[0] - best[1]) for best in (one[step].topk(2)[0], other[step].topk(2)[0])
        ]
        first = {"step": step, "margin": margins, "moved": float(apart[step].max())}
    return {
        "first_logits": largest(1),
        "until_different": largest(parted[0] + 1 if parted else len(one)),
        "all_steps": largest(len(one)),
        "median_relative_l2": float(relative.median()),
        "first_different_token": first,
        "different_tokens": len(parted),
    }
