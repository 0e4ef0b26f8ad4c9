"""One pass of the language model over rows of one conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from raincheck_hf.buffers import KeyValueBuffer, Rows, Span
from raincheck_hf.models import Adapter, vision
from raincheck_hf.recurrent import RecurrentState
from raincheck_hf.regions import Group


@dataclass(frozen=True)
class Token:
    """A generated token to consume.

    Attributes:
        ids: int64 [1], anywhere.
        position: int64 [3] on the CPU, its M-RoPE position.
    """

    ids: Tensor
    position: Tensor


@dataclass(frozen=True)
class Pass:
    """What to run.

    Attributes:
        spans: Input rows of P or D, one span after the other.
        token: The decode row behind them, or None.
        groups: Where the rows go and what they see: the spans' rows, then the token's.
        recurrent: State of each recurrent layer before the pass; empty before the first one.
        opening: Whether the rows are P, which recurrent layers run from the live state.
        record: Whether suffix rows must be kept for later joins, because D is not complete.
        wants_logits: Whether the last row's logits are needed.
        reserve: Slots to allocate at least.
        chunk_size: The largest chunk that rides in this turn's passes, so that passes of one shape
            can be prepared once.
    """

    spans: tuple[Span, ...]
    token: Token | None
    groups: tuple[Group, ...]
    recurrent: Mapping[int, RecurrentState]
    opening: bool = False
    record: bool = False
    wants_logits: bool = True
    reserve: int = 0
    chunk_size: int = 0

    @property
    def chunk(self) -> int:
        """Rows of P or D."""
        return sum(map(len, self.spans))

    def rows(self, adapter: Adapter, model: Any) -> Rows:
        """All input rows, put together."""
        parts = [span.rows() for span in self.spans]
        if self.token is not None:
            embeds = adapter.embed(model, self.token.ids)
            visual = torch.empty(0, dtype=torch.long, device=embeds.device)
            parts.append(Rows(embeds, self.token.position[:, None].to(embeds.device), visual))
        return Rows.cat(parts)


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
    """Runs passes of the language model and of the vision tower.

    Attributes:
        name: As in the config and the report.
        one_device: Whether the whole model is on one device, so that the tower may run aside.
    """

    name: str
    one_device: bool

    def run(self, model: Any, work: Pass, buffers: Mapping[int, KeyValueBuffer]) -> PassResult:
        """Run one pass.

        Keys and values are written to the rows' own slots of ``buffers``, which nobody reads until
        the pass is published; nothing else is changed.
        """

    def encode(
        self, model: Any, pixel_values: Tensor, grid_thw: Tensor, kind: vision.Kind
    ) -> vision.VisionOutput:
        """Run the vision tower; see ``models.vision.encode``."""
