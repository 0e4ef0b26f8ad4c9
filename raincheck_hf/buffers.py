"""Tensors of one conversation: key/value buffers by slot, and the rows waiting to be restored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SLOT_STEP = 64
_GROWTH = 1.25


class KeyValueBuffer:
    """Keys and values of one attention layer, [1, H, slots, dim], addressed by physical slot.

    Memory is allocated on the first write, on the device and in the dtype of what is written, and
    grows without disturbing what is there. It starts as zeros: a reserved slot may be inside the
    keys handed to an attention kernel before it is written, and masked-out rubbish must be finite.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def slots(self) -> int:
        """How many slots are allocated."""
        return 0 if self.keys is None else self.keys.shape[2]

    def reserve(self, slots: int, like: Tensor, heads: int, dim: int) -> None:
        """Allocate at least ``slots`` slots of [heads, dim], in ``like``'s dtype and place."""
        if slots > self.slots:
            rows = like.new_empty(1, heads, 0, dim)
            self._grow(slots, rows, rows)

    def write(self, slot: int, keys: Tensor, values: Tensor, reserve: int) -> None:
        """Put rows [1, H, T, dim] at ``slot``; allocate at least ``reserve`` slots."""
        stop = slot + keys.shape[2]
        if max(stop, reserve) > self.slots:
            self._grow(max(stop, reserve), keys, values)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, slot:stop] = keys
        self.values[:, :, slot:stop] = values

    def read(self, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the slots before ``stop``."""
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def saved(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values in slots ``start`` to ``stop``."""
        keys, values = self.read(stop)
        return keys[:, :, start:].clone(), values[:, :, start:].clone()

    def copy(self) -> KeyValueBuffer:
        """An independent copy."""
        twin = KeyValueBuffer()
        if self.keys is not None and self.values is not None:
            with torch.inference_mode(False):
                twin.keys, twin.values = self.keys.clone(), self.values.clone()
        return twin

    def free(self) -> None:
        """Let the memory go."""
        self.keys = self.values = None

    def _grow(self, wanted: int, keys: Tensor, values: Tensor) -> None:
        slots = max(wanted, int(self.slots * _GROWTH))
        slots = -(-slots // _SLOT_STEP) * _SLOT_STEP
        self.keys = self._extended(self.keys, keys, slots)
        self.values = self._extended(self.values, values, slots)

    @staticmethod
    def _extended(old: Tensor | None, like: Tensor, slots: int) -> Tensor:
        batch, heads, _, dim = like.shape
        # An inference tensor could not be written to by a later turn outside inference mode.
        with torch.inference_mode(False):
            new = torch.zeros((batch, heads, slots, dim), dtype=like.dtype, device=like.device)
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new


@dataclass(frozen=True)
class Rows:
    """Input rows of one pass.

    Attributes:
        embeds: [T, d], merged input embeddings.
        positions: int64 [3, T], M-RoPE positions in the full prompt.
        visual: int64 [V], which rows are multimodal, ascending.
        deepstack: One [V, d] tensor per DeepStack layer for the V multimodal rows, or empty.
    """

    embeds: Tensor
    positions: Tensor
    visual: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.embeds)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (self.embeds, self.positions, self.visual, *self.deepstack)

    def pick(self, index: Tensor, multimodal: int | None = None) -> Rows:
        """Copies of the rows at ``index`` (int64 [t]), in that order.

        Args:
            index: Which rows.
            multimodal: How many of them are multimodal; a GPU is waited for where it is not known.
        """
        chosen = self._is_visual()[index]
        if multimodal is None:
            multimodal = int(chosen.sum())
        visual = torch.argsort(~chosen, stable=True)[:multimodal]
        of_visual = torch.searchsorted(self.visual, index[visual]) if self.deepstack else None
        return Rows(
            embeds=self.embeds[index],
            positions=self.positions[:, index],
            visual=visual,
            deepstack=tuple(layer[of_visual] for layer in self.deepstack),
        )

    def _is_visual(self) -> Tensor:
        mask = torch.zeros(len(self), dtype=torch.bool, device=self.embeds.device)
        return mask.index_fill_(0, self.visual, True)

    @classmethod
    def cat(cls, parts: Sequence[Rows]) -> Rows:
        """Rows of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        layers = zip(*(part.deepstack for part in parts if part.deepstack), strict=True)
        starts = itertools.accumulate((len(part) for part in parts), initial=0)
        return cls(
            embeds=torch.cat([part.embeds for part in parts]),
            positions=torch.cat([part.positions for part in parts], dim=1),
            visual=torch.cat([part.visual + start for part, start in zip(parts, starts)]),  # noqa: B905
            deepstack=tuple(torch.cat(layer) for layer in layers),
        )


@dataclass(frozen=True)
class Span:
    """Rows ``start`` to ``stop`` of a block of rows that stays where it is."""

    block: Rows
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def rows(self) -> Rows:
        """The rows by themselves; copies, unless they are the whole block."""
        if len(self) == len(self.block):
            return self.block
        index = torch.arange(self.start, self.stop, device=self.block.embeds.device)
        return self.block.pick(index)


class DeferredRows:
    """The rows of D still to be restored, in the order of restoration. Never changes in place.

    They are held in small blocks with memory of their own, so that what was restored is freed while
    the rest still waits.
    """

    BLOCK = 64

    def __init__(self, blocks: Sequence[Rows] = (), offset: int = 0) -> None:
        self._blocks = tuple(blocks)
        self._offset = offset  # rows of the first block already restored

    @classmethod
    def of(cls, rows: Rows, order: Tensor) -> DeferredRows:
        """Copy the rows at ``order`` (int64 [D]), all of which are multimodal."""
        blocks = order.split(cls.BLOCK) if len(order) else ()
        return cls([rows.pick(block, multimodal=len(block)) for block in blocks])

    def __len__(self) -> int:
        return sum(map(len, self._blocks)) - self._offset

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [tensor for block in self._blocks for tensor in block.tensors()]

    @property
    def device(self) -> torch.device:
        """Where the rows wait; there must be some."""
        return self._blocks[0].embeds.device

    def peek(self, count: int) -> tuple[Span, ...]:
        """Where the first ``count`` rows lie."""
        spans, offset = [], self._offset
        for block in self._blocks:
            if count <= 0:
                break
            stop = min(len(block), offset + count)
            spans.append(Span(block, offset, stop))
            count -= stop - offset
            offset = 0
        return tuple(spans)

    def without(self, count: int) -> DeferredRows:
        """The rows after the first ``count``; blocks used up are let go."""
        blocks, offset = self._blocks, self._offset + count
        while blocks and offset >= len(blocks[0]):
            offset -= len(blocks[0])
            blocks = blocks[1:]
        return DeferredRows(blocks, offset)
