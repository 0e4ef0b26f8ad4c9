"""The descriptor of a pass: filled on the host, copied to the device, read by every kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raincheck_hf.buffers import KeyValueBuffer
from raincheck_hf.executor.base import Pass
from raincheck_hf.executor.plan import Plan
from raincheck_hf.executor.states import Change, RecurrentPass
from raincheck_hf.kernels import descriptor as d
from raincheck_hf.kernels.rows import DEEPSTACK_AT, EMBED_AT, POSITION_AT, POSITION_STEP
from raincheck_hf.regions import Group

# Host copies in turn, so that one is not written over while the device still reads it.
_COPIES = 8


class Descriptor:
    """Device memory for one descriptor, and what fills it.

    Attributes:
        header: int64 [HEADER], on the device.
        lines: int64 [capacity, line], of the chunk rows; see `kernels.rows`.
        records: int64 [layers, RECORD_SIZE].
    """

    def __init__(self, plan: Plan, capacity: int, again: bool = True) -> None:
        """Make room.

        Args:
            plan: The model.
            capacity: Chunk rows at most that are fetched from where they wait.
            again: Whether it will be written more than once.
        """
        self._plan = plan
        self._line = -(-(DEEPSTACK_AT.value + plan.deepstack) // 2) * 2
        self._starts = (d.HEADER.value, d.HEADER.value + capacity * self._line)
        layers, size = len(plan.layers), d.RECORD_SIZE.value
        total = self._starts[1] + layers * size
        with torch.inference_mode(False):  # written again in later turns
            self._device = torch.zeros(total, dtype=torch.int64, device=plan.device)
        self.header, self.lines, self.records = self._parts(self._device, capacity)
        pinned = plan.device.type == "cuda"
        self._hosts = [
            torch.zeros(total, dtype=torch.int64, pin_memory=pinned)
            for _ in range(_COPIES if pinned and again else 1)
        ]
        self._views: list[tuple[Any, ...]] = [
            tuple(part.numpy() for part in self._parts(host, capacity)) for host in self._hosts
        ]
        self._copied: list[Any] = [None] * len(self._hosts)
        self._next = 0

    def _parts(self, whole: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        first, second = self._starts
        return (
            whole[:first],
            whole[first:second].view(capacity, self._line),
            whole[second:].view(-1, d.RECORD_SIZE.value),
        )

    def write(
        self,
        work: Pass,
        buffers: Mapping[int, KeyValueBuffer],
        recurrent: RecurrentPass | None,
        fetched: bool,
    ) -> None:
        """Describe a pass; the copy to the device is queued on the current stream.

        Args:
            work: The pass.
            buffers: Keys and values by attention layer; large enough.
            recurrent: What recurrent layers read and write; None without such layers.
            fetched: Whether the kernels fetch the rows themselves, by their lines.
        """
        turn, self._next = self._next, (self._next + 1) % len(self._hosts)
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        header, lines, records = self._views[turn]
        self._write_header(header, work, recurrent.change if recurrent else None)
        if fetched:
            self._write_lines(lines, work)
        for layer, buffer in buffers.items():
            assert buffer.keys is not None and buffer.values is not None
            records[layer, d.KEYS.value] = buffer.keys.data_ptr()
            records[layer, d.VALUES.value] = buffer.values.data_ptr()
            records[layer, d.STRIDE.value] = buffer.keys.stride(1)
        if recurrent is not None:
            records[list(recurrent.layers)] = recurrent.records
        self._device.copy_(self._hosts[turn], non_blocking=True)
        if self._device.is_cuda:
            event = self._copied[turn] = self._copied[turn] or torch.cuda.Event()
            event.record()

    @staticmethod
    def _write_header(header: Any, work: Pass, change: Change | None) -> None:
        chunk: Group | None = work.groups[0] if work.spans else None
        header[:] = 0
        if chunk is not None:
            header[d.PREFIX.value] = chunk.slot
            header[d.CHUNK.value] = chunk.rows
        if work.token is not None:
            own = work.groups[-1]
            prefix, answer = own.sees
            header[d.PREFIX.value] = prefix[1]
            header[d.ANSWER.value] = answer[0]
            header[d.END.value] = own.slot
            header[d.TOKEN.value] = 1
            header[d.TOKEN_ID.value] = work.token.ids.data_ptr()
            at = d.POSITION.value
            header[at : at + 3] = work.token.position.numpy()
        if change is not None:
            header[d.RECORD.value] = change.record
            header[d.LEAD.value] = change.lead
            header[d.MAPPED.value] = change.mapped

    def _write_lines(self, lines: Any, work: Pass) -> None:
        row = 0
        for span in work.spans:
            block = span.block
            size = block.embeds.element_size()
            for entry, tensor, skip in (
                (EMBED_AT.value, block.embeds, block.embeds.stride(0) * size),
                (POSITION_AT.value, block.positions, block.positions.stride(1) * 8),
                *(
                    (DEEPSTACK_AT.value + i, layer, layer.stride(0) * size)
                    for i, layer in enumerate(block.deepstack)
                ),
            ):
                first = tensor.data_ptr()
                lines[row : row + len(span), entry] = range(
                    first + span.start * skip, first + span.stop * skip, skip
                )
            lines[row : row + len(span), POSITION_STEP.value] = block.positions.stride(0)
            row += len(span)
