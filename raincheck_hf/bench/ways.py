"""The ways to run a conversation that are compared, each as a change to one configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from raincheck_hf.bench.ablations import by_position, uncorrected
from raincheck_hf.config import RaincheckConfig

WAYS: Mapping[str, Mapping[str, Any]] = {
    "full": {"retention": 1.0},
    "hard": {"defer": "never"},
    "raincheck": {},
    "post_answer": {"defer": "post_answer"},
    "relevance": {"order": "relevance"},
    "uncorrected": {"executor": "modules"},
    "by_position": {"executor": "modules"},
}
"""What each way changes. `uncorrected` is raincheck without the state correction, `by_position`
with chunks that see what stands before them in the source only; see `ablations`, which reach passes
through the model's own layers alone."""

RECURRENT_ONLY = ("uncorrected",)
"""Ways that mean nothing without recurrent layers."""

_CIRCUMSTANCES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "uncorrected": uncorrected,
    "by_position": by_position,
}


def config_of(way: str, base: RaincheckConfig) -> RaincheckConfig:
    """The configuration of a way.

    Args:
        way: A key of `WAYS`.
        base: What raincheck itself runs with.
    """
    return base.replace(**WAYS[way])


def circumstances(way: str) -> AbstractContextManager[None]:
    """What must be in force while a way runs, its completion between two turns included."""
    return _CIRCUMSTANCES.get(way, nullcontext)()
