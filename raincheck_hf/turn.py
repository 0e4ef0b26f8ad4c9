"""One turn: what ``generate`` prepares, and what the model's forward does while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor

from raincheck_hf import passes
from raincheck_hf.aside import Aside
from raincheck_hf.buffers import DeferredRows, Rows
from raincheck_hf.cache import RaincheckCache
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.conversation import Conversation
from raincheck_hf.executor import Executor
from raincheck_hf.inputs import NewInput, query_mask
from raincheck_hf.models import vision
from raincheck_hf.report import RaincheckReport, TurnClock
from raincheck_hf.schedule import decode_chunk
from raincheck_hf.selection import Selection, SelectionContext, is_built_in, select
from raincheck_hf.turnstile import turnstile

# Slots allocated ahead for the answer; longer answers grow the buffers.
_MOST_RESERVED = 1024


@dataclass(frozen=True)
class _Staged:
    """What the first forward needs.

    Attributes:
        initial: Rows of P.
        pending: How many rows D has.
        rest: Makes D's rows, in the order of restoration, and completes the report.
        next_position: M-RoPE position behind the input.
        answer_position: int64 [3] on the CPU, of y1.
    """

    initial: Rows
    pending: int
    rest: Callable[[], DeferredRows]
    next_position: int
    answer_position: Tensor


class Turn:
    """Drives the passes of one ``generate`` call on one cache.

    Attributes:
        report: The turn's report.
    """

    def __init__(
        self,
        cache: RaincheckCache,
        history: Conversation,
        config: RaincheckConfig,
        executor: Executor,
        new: NewInput,
        clock: TurnClock,
        answer_length: int,
    ) -> None:
        """Encode what is new and select from it; the language model does not run yet.

        Args:
            cache: The conversation.
            history: What the turn goes on from.
            config: How it runs.
            executor: What runs its passes.
            new: What is new in its input.
            clock: Started when the call came.
            answer_length: Tokens that the answer may have.

        Raises:
            ValueError: The selector failed; nothing was changed.
        """
        self._cache = cache
        self._history = history
        self._config = config
        self._executor = executor
        self._clock = clock
        self._armed = 0
        self._reserve = min(answer_length, _MOST_RESERVED)
        self._new = new
        self.report = RaincheckReport(executor=executor.name)
        # Modules that hooks move between devices keep to the caller's stream.
        model = cache.model
        self._selection: Selection | None = None
        self._aside = Aside(model.device if executor.one_device else torch.device("cpu"))
        self._staged: _Staged | None = self._stage()

    @property
    def whole(self) -> bool:
        """Whether the ids passed are the whole conversation, not the new tokens alone."""
        return self._new.whole

    def forward(self, ids: Tensor) -> Tensor:
        """What the model's forward does in this turn: prefill first, one token at a time then.

        Args:
            ids: int64 [1, T], as the stock loop passes them.

        Returns:
            Logits [1, 1, vocabulary].
        """
        if self._staged is not None:
            return self._prefill()[None]
        chunk, self._armed = self._armed, 0
        pending = self._cache.pending
        logits = passes.decode(self._cache, self._executor, ids[0], chunk, self._config)
        # What rode, which is less than was armed where memory ran short.
        self.report.restored_per_step.append(pending - self._cache.pending)
        return logits[None]

    def arm(self) -> None:
        """Between two steps: choose the chunk that rides in the next pass."""
        self._clock.step()
        regions = self._cache.conversation.regions
        self._armed = decode_chunk(self._config, regions.answer + 1, regions.pending)

    def close(self) -> None:
        """After the last step, or after an exception: disarm, write the times."""
        self._armed = 0
        self._staged = None
        self._clock.write(self.report)

    def _prefill(self) -> Tensor:
        assert self._staged is not None
        cache, new, staged = self._cache, self._new, self._staged
        before = self._history
        self._aside.join(*staged.initial.tensors())
        if cache.broken_off is not None and before is cache.broken_off.conversation:
            cache.withdraw()  # what is left of the broken turn is not restored any more
        else:
            cache.complete()  # the barrier, now that nothing can be refused any more
            before = cache.conversation
        cache.complete_with(self._config, self._executor)
        if new.rollback:
            before = before.without_answer()
        after = Conversation(
            regions=before.regions.next_turn(len(staged.initial), staged.pending),
            recurrent=before.recurrent,
            prompt_ids=torch.cat([before.consumed_ids, new.ids]),
            items=(*before.items, *new.items),
            next_position=staged.next_position,
            answer_position=staged.answer_position,
        )
        self._clock.start("prefill_ms")
        logits = passes.prefill(
            cache,
            self._executor,
            staged.initial,
            before,
            after,
            self.report,
            reserve=after.regions.end + self._reserve,
            rest=staged.rest,
        )
        self._clock.stop("prefill_ms")
        self._staged = None
        return logits

    def _stage(self) -> _Staged:
        """P and D of the new input. A GPU is not waited for: its queue goes on to the prefill."""
        history = self._history.without_answer() if self._new.rollback else self._history
        new = self._new
        grids = {kind: grid for kind, (_, grid) in new.pixels.items()}
        ahead = self._executor.one_device
        # Aside, the tower starts first; on the caller's stream it would hold up all copies.
        seen = self._encode(grids) if new.items and ahead else None
        adapter, model = self._cache.adapter, self._cache.model
        positions = adapter.positions(
            model, new.ids, new.types, grids, history.position, new.seconds
        ).cpu()
        text = self._embed(positions)
        query = self._query(text.embeds) if new.items else text.embeds[:0]
        if new.items and not ahead:
            seen = self._encode(grids)
        with self._aside.queue(text.embeds, text.positions, text.visual, query):
            rows, kept, scores, count = self._choose(text, query, seen)
            # What is kept, then what is not, both in source order.
            order = torch.argsort(~kept, stable=True)
            multimodal = count - int((new.types == 0).sum())
            initial = rows.pick(order[:count], multimodal)
        waiting = len(rows) - count

        def rest() -> DeferredRows:
            # Aside, so that neither the rows nor the report wait for the pass that is under way.
            with self._aside.further():
                if self._selection is not None and self._selection.scores.is_cuda:
                    self._selection.check()
                later = order[count:]
                if self._config.order == "relevance":
                    best = torch.sort(scores[later], descending=True, stable=True).indices
                    later = later[best]
                self._describe(kept, later)
                # Hard pruning drops D: no slots, no rows, though its tokens count in the ids.
                deferred = DeferredRows.of(rows, later[:0] if self._config.drops else later)
            self._aside.join(*deferred.tensors())
            return deferred

        return _Staged(
            initial=initial,
            pending=0 if self._config.drops else waiting,
            rest=rest,
            # Not behind the largest: a video's time may run ahead of the text (Qwen2.5-VL).
            next_position=int(positions[1:, -1].max()) + 1,
            answer_position=positions[:, -1] + 1,
        )

    def _embed(self, positions: Tensor) -> Rows:
        """The new input's rows without what the tower sees; all that is copied to the device."""
        cache, new = self._cache, self._new
        with turnstile(cache.model):  # hooks may bring the table in and take it away
            embeds = cache.adapter.embed(cache.model, new.ids)
        visual = (new.types != 0).nonzero().flatten()
        return Rows(embeds, positions.to(embeds.device), visual.to(embeds.device))

    def _choose(
        self, text: Rows, query: Tensor, seen: vision.VisionOutput | None
    ) -> tuple[Rows, Tensor, Tensor, int]:
        """Merged rows, which of them are in P (bool), their scores, and how many are in P."""
        device, visual = text.embeds.device, text.visual
        kept = torch.ones(len(text), dtype=torch.bool, device=device)
        scores = torch.zeros(len(text), device=device)
        if seen is None:
            return text, kept, scores, len(text)
        selection = self._selection = self._select(seen, query)
        kept[visual] = selection.mask.to(device)
        kept[-1:] = True  # rule 3: the last row gives y1
        scores[visual] = selection.scores.to(device)
        known = selection.count is not None and int(self._new.types[-1]) == 0
        others = len(text) - len(visual)
        count = others + (selection.count or 0) if known else int(kept.sum())
        rows = Rows(
            text.embeds.index_copy(0, visual, seen.embeds.to(device, text.embeds.dtype)),
            text.positions,
            visual,
            tuple(layer.to(device) for layer in seen.deepstack),
        )
        return rows, kept, scores, count

    def _query(self, embeds: Tensor) -> Tensor:
        """[m, d], embeddings of the current turn's text."""
        new, model = self._new, self._cache.model
        special = self._cache.adapter.special_ids(model)
        mask = query_mask(new.ids, new.types, end_ids(model), special)
        return embeds[mask.nonzero().flatten().to(embeds.device)]

    def _encode(self, grids: dict[str, Tensor]) -> vision.VisionOutput:
        """The vision tower, once over each new image and video (rule 1)."""
        model = self._cache.model
        with self._aside.queue(*(pixels for pixels, _ in self._new.pixels.values())):
            self._clock.start("vision_ms")
            outputs = [
                self._executor.encode(model, _to(model.device, pixels), grids[kind], kind)  # type: ignore[arg-type]
                for kind, (pixels, _) in self._new.pixels.items()
            ]
            seen = vision.in_source_order(outputs, [item.kind for item in self._new.items])  # type: ignore[misc]
            self._clock.stop("vision_ms")
        return seen

    def _select(self, seen: vision.VisionOutput, query: Tensor) -> Selection:
        self._clock.start("select_ms")
        config = self._config
        context = SelectionContext(
            seen.embeds,
            seen.grid,
            seen.kind,
            query=query,
            features=lambda: seen.features,
            attention=lambda: seen.attention,
            seed=config.seed,
        )
        # A user's own scores are looked at before the language model runs; for ours, which are
        # finite wherever the picture is, a GPU does not wait: they are looked at before publishing.
        trusted = context.device.type == "cuda" and is_built_in(config.selector)
        selection = select(
            context, config.selector, config.retention, config.retention_scope, wait=not trusted
        )
        seen.release()
        self._clock.stop("select_ms")
        return selection

    def _describe(self, kept: Tensor, later: Tensor) -> None:
        """Complete the report; waits for the selection."""
        kept, order = kept.cpu(), later.cpu()
        visual = self._new.types != 0
        report, offset = self.report, self._new.offset
        report.selected = (kept & visual).nonzero().flatten() + offset
        report.deferred = order + offset
        report.n_visual = int(visual.sum())
        report.n_selected = len(report.selected)
        report.n_deferred = len(report.deferred)
        report.pending = 0 if self._config.drops else report.n_deferred


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    """On the model's device; offloaded weights are on "meta", and their hooks move the input."""
    return tensor if device.type == "meta" else tensor.to(device)


class StepHook(LogitsProcessor):
    """Called by the stock loop between two steps; scores pass through unchanged."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Arm the next chunk."""
        self._turn.arm()
        return scores


def end_ids(model: Any) -> frozenset[int]:
    """Ids that end a message."""
    found: set[int] = set()
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return frozenset(found)
