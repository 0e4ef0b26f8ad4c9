"""One pass of the language model over rows of one conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from raincheck_hf.buffers import KeyValueBuffer, Rows
from raincheck_hf.recurrent import RecurrentState
from raincheck_hf.regions import Group


@dataclass(frozen=True)
class Pass:
    """What to run.

    Attributes:
        rows: Input rows; the groups' rows one after the other.
        groups: Where the rows go and what they see.
        recurrent: State of each recurrent layer before the pass; empty before the first one.
        opening: Whether the rows are P, which recurrent layers run from the live state.
        record: Whether suffix rows must be kept for later joins, because D is not complete.
        wants_logits: Whether the last row's logits are needed.
        reserve: Slots to allocate at least.
    """

    rows: Rows
    groups: tuple[Group, ...]
    recurrent: Mapping[int, RecurrentState]
    opening: bool = False
    record: bool = False
    wants_logits: bool = True
    reserve: int = 0


@dataclass(frozen=True)
class PassResult:
    """What a pass made. Nothing of it is visible until the cache publishes it.

    Attributes:
        logits: [1, vocabulary] of the last row, or None.
        recurrent: State of each recurrent layer after the pass.
    """

    logits: Tensor | None
    recurrent: Mapping[int, RecurrentState]


class Executor(Protocol):
    """Runs passes.

    Attributes:
        name: As in the config and the report.
    """

    name: str

    def run(self, model: Any, work: Pass, buffers: Mapping[int, KeyValueBuffer]) -> PassResult:
        """Run one pass.

        Keys and values are written to the rows' own slots of ``buffers``, which nobody reads until
        the pass is published; nothing else is changed.
        """
