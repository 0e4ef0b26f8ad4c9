"""The state of one conversation, as one value: a pass publishes a new one or changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from raincheck_hf.buffers import DeferredRows
from raincheck_hf.inputs import Item
from raincheck_hf.recurrent import RecurrentState
from raincheck_hf.regions import Regions


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, eq=False)
class Conversation:
    """Everything about a conversation but its keys and values. Never changes in place.

    Attributes:
        regions: Lengths of the current turn's regions.
        recurrent: State of each recurrent layer.
        deferred: Rows still to be restored.
        prompt_ids: int64 [n] on the CPU: all tokens up to the end of the turn's input, in source
            order, restored or not (hard pruning: dropped or not).
        answer_ids: The consumed generated tokens of the turn, int64 [1] each, on their device.
        items: All images and videos.
        next_position: M-RoPE position of the first text token behind the turn's input.
        answer_position: int64 [3] on the CPU, M-RoPE position of y1. The same number on all axes,
            unless the input ends in a multimodal token: each axis goes on from its own then.
    """

    regions: Regions = Regions()
    recurrent: Mapping[int, RecurrentState] = field(default_factory=dict)
    deferred: DeferredRows = DeferredRows()
    prompt_ids: Tensor = field(default_factory=_no_ids)
    answer_ids: tuple[Tensor, ...] = ()
    items: tuple[Item, ...] = ()
    next_position: int = 0
    answer_position: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.long))

    @property
    def consumed_ids(self) -> Tensor:
        """int64 [n] on the CPU: every token that has been consumed, in source order."""
        if not self.answer_ids:
            return self.prompt_ids
        return torch.cat([self.prompt_ids, torch.cat(self.answer_ids).cpu()])

    @property
    def position(self) -> int:
        """M-RoPE position where the next turn's input starts."""
        return self.next_position + len(self.answer_ids)

    def without_answer(self) -> Conversation:
        """Rolled back to the end of the turn's input (rule 14). P and D must be complete."""
        return replace(
            self,
            regions=self.regions.without_answer(),
            recurrent={i: state.without_answer() for i, state in self.recurrent.items()},
            answer_ids=(),
        )

    def after(
        self,
        recurrent: Mapping[int, RecurrentState],
        *,
        restored: int = 0,
        token: Tensor | None = None,
    ) -> Conversation:
        """After a pass that restored deferred tokens, consumed a generated one, or both.

        Args:
            recurrent: Recurrent states after the pass.
            restored: How many deferred tokens it restored.
            token: int64 [1], the generated token that it consumed.
        """
        regions = self.regions.with_restored(restored)
        answer_ids = self.answer_ids
        if token is not None:
            regions = regions.with_answer(1)
            answer_ids = (*answer_ids, token)
        if regions.pending == 0 and self.regions.pending > 0:
            recurrent = {i: state.settled() for i, state in recurrent.items()}
        return replace(
            self,
            regions=regions,
            recurrent=recurrent,
            deferred=self.deferred.without(restored) if restored else self.deferred,
            answer_ids=answer_ids,
        )


def adopt_tensors(conversation: Conversation) -> None:
    """Tell the allocator that the current stream uses states made on the background's stream.

    Without it, memory freed here could be handed out on that stream while our kernels read it.
    """
    for state in conversation.recurrent.values():
        tensors = [state.prefix.state, state.prefix.history, state.live.state, state.live.history]
        tensors += [each for each in (state.lead_state, state.phi) if each is not None]
        if state.lead is not None:
            tensors += [state.lead.inputs, state.lead.g, state.lead.beta]
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
