"""The ways to run a conversation that are compared, each as a change to one configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from raincheck_hf.config import RaincheckConfig
from raincheck_hf.kernels.suffix_map import Convolution
from raincheck_hf.recurrent import Checkpoint, RecurrentState

WAYS: Mapping[str, Mapping[str, Any]] = {
    "full": {"retention": 1.0},
    "hard": {"defer": "never"},
    "raincheck": {},
    "post_answer": {"defer": "post_answer"},
    "uncorrected": {},
}
"""What each way changes. `uncorrected` is raincheck without the state correction."""


def config_of(way: str, base: RaincheckConfig) -> RaincheckConfig:
    """The configuration of a way.

    Args:
        way: A key of `WAYS`.
        base: What raincheck itself runs with.
    """
    return base.replace(**WAYS[way])


def circumstances(way: str) -> AbstractContextManager[None]:
    """What must be in force while a way runs, its completion between two turns included."""
    return uncorrected() if way == "uncorrected" else nullcontext()


@contextmanager
def uncorrected() -> Iterator[None]:
    """Switch the state correction off, everywhere, until the context is left (ablation).

    Restored tokens then move the prefix checkpoint of a recurrent layer, but its live state stays
    as it is: neither boundary repair nor join. Attention layers are not concerned. The switch is
    on the class, so that no other turn may run meanwhile.
    """
    corrected = RecurrentState.moved

    def moved(self: RecurrentState, conv: Convolution, prefix: Checkpoint) -> RecurrentState:
        if self.lead is None:  # without a suffix the live state is the checkpoint itself
            return corrected(self, conv, prefix)
        return replace(self, prefix=prefix)

    RecurrentState.moved = moved  # type: ignore[method-assign]
    try:
        yield
    finally:
        RecurrentState.moved = corrected  # type: ignore[method-assign]
