"""Attention by region. Plain PyTorch: the definition, and the twin of `attention_kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lengths:
    """What a pass's header says, on the host; see `descriptor`.

    Attributes:
        prefix: slots visible before the reserved gap, before this pass.
        chunk: chunk rows in use; they go to slots prefix, prefix + 1, ...
        answer: slot of y_1.
        end: slot of the decode row.
        token: whether there is a decode row.
    """

    prefix: int
    chunk: int
    answer: int
    end: int
    token: bool

    def used(self, capacity: int) -> tuple[list[int], list[int]]:
        """Rows in use of `capacity` chunk rows and a decode row, and their slots."""
        chunk = min(self.chunk, capacity)
        rows = list(range(chunk)) + [capacity] * self.token
        slots = [self.prefix + row for row in range(chunk)] + [self.end] * self.token
        return rows, slots

    def visible(self, capacity: int, slots: int) -> Tensor:
        """Who sees whom, bool [capacity + 1, slots]: rules 5 and 6; unused rows see nothing."""
        slot = torch.arange(slots)
        seen = torch.zeros(capacity + 1, slots, dtype=torch.bool)
        for row in range(min(self.chunk, capacity)):
            seen[row] = slot <= self.prefix + row
        if self.token:
            answer = (slot >= self.answer) & (slot <= self.end)
            seen[capacity] = (slot < self.prefix) | answer
        return seen


def region_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Lengths,
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention of a pass's rows, after their keys and values were written.

    Args:
        q: [T, Hq, dim], T = capacity + 1 rows; query head h reads key head h // (Hq / H).
        keys: [H, slots, dim].
        values: [H, slots, dim].
        lengths: of the pass.
        scale: multiplies the scores.
        gate: [T, Hq, dim]; its sigmoid multiplies the result. None: no gate.

    Returns:
        [T, Hq · dim] in q's dtype; zero in rows not in use.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // len(keys)
    seen = lengths.visible(len(q) - 1, keys.shape[1]).to(q.device)
    spread = (keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0))
    scores = torch.einsum("thd,hsd->hts", q.to(wide), spread[0].to(wide)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
    total = weights.sum(-1, keepdim=True)
    mixed = torch.einsum("hts,hsd->htd", weights.to(q.dtype).to(wide), spread[1].to(wide))
    out = (mixed / total.masked_fill(total == 0, 1)).to(q.dtype).transpose(0, 1)
    if gate is not None:
        out = out * torch.where(seen.any(-1)[:, None, None], torch.sigmoid(gate), 0)
    return out.reshape(len(q), -1)
