"""RaincheckCache: one conversation's keys, values, states and deferred tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from raincheck_hf import passes
from raincheck_hf.buffers import KeyValueBuffer
from raincheck_hf.completion import Job, completer
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.conversation import Conversation, adopt_tensors
from raincheck_hf.executor import Executor, choose_executor
from raincheck_hf.models import adapter_for
from raincheck_hf.progress import Phase, Progress
from raincheck_hf.report import RaincheckReport, mark
from raincheck_hf.wrapped import unwrapped

# While a call waits, this many completion chunks go in one pass: few large passes are quicker.
_BARRIER_CHUNKS = 4


@dataclass(frozen=True)
class BrokenOff:
    """What there was before a turn that has not returned (yet).

    Attributes:
        conversation: What the turn went on from.
        last_token: Its last generated token; None where the turn dropped the last answer.
        report: The report of the turn before.
    """

    conversation: Conversation
    last_token: int | None
    report: RaincheckReport | None


class RaincheckCache(Cache):
    """The cache of one conversation, handed from turn to turn.

    ``RaincheckCache(model)`` is an empty one. It belongs to that model and is used by one call of
    ``generate(..., raincheck=...)`` at a time. Memory is freed by ``close()``, or when the last
    reference goes. ``copy.deepcopy`` (or ``fork()``) makes an independent conversation; pickling is
    refused.

    Attributes:
        model: The model it belongs to.
        conversation: The published state; replaced whole, never changed in place.
        buffers: Keys and values by attention layer.
        report: The last turn's report, or None.
        turn: The turn under way, or None.
        last_token: The last generated token, not consumed yet; None while a turn runs, and after
            one that broke off.
        on_progress: Called after each pass that restored deferred tokens, in the thread that ran it
            (the worker's, in the background). What it raises counts as an error of that pass,
            which stays published.
        broken_off: What there was before a turn that has not returned (yet), so that it can be
            asked again.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, model: Any) -> None:
        model = unwrapped(model)
        self.adapter = adapter_for(model)
        self.model = model
        kinds = self.adapter.layer_kinds(model)
        # Stock code only counts the layers and asks which of them are linear.
        super().__init__(layers=list(kinds))  # type: ignore[arg-type]
        self.buffers = {i: KeyValueBuffer() for i, kind in enumerate(kinds) if kind == "attention"}
        self.conversation = Conversation()
        self.report: RaincheckReport | None = None
        self.last_token: int | None = None
        self.closed = False
        self.broken_off: BrokenOff | None = None
        self.on_progress: Callable[[Progress], None] | None = None
        self.turn: Any = None
        self._job: Job | None = None
        self._rest: tuple[RaincheckConfig, Executor] = (
            RaincheckConfig(),
            choose_executor("modules", model),  # nothing to restore before a turn chose its own
        )
        self._use = threading.Lock()

    # -- what a user asks ---------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Deferred tokens not yet restored."""
        return self.conversation.regions.pending

    @property
    def token_ids(self) -> Tensor:
        """int64 [n] on the CPU: the tokens consumed so far, in source order, restored or not.

        The last generated token is not among them: it belongs to the next turn's input.
        """
        return self.conversation.consumed_ids

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens consumed so far, restored or not: where the next turn's new tokens start."""
        return len(self.conversation.prompt_ids) + len(self.conversation.answer_ids)

    def finish(self, timeout: float | None = None) -> None:
        """The barrier: return when nothing is pending.

        Args:
            timeout: Seconds to wait for the background; None takes the rest over and restores it
                here, which is the fastest way.

        Raises:
            TimeoutError: Not done in time; the work goes on.
            ValueError: The cache is closed, or in use by a call.
            Exception: What the background raised. What was restored before stays valid, and the
                next barrier tries again.
        """
        with self.in_use():
            job = self._job
            if timeout is not None and job is None and self.pending:
                job = self._job = completer(self.model).submit(self)
            if timeout is not None and job is not None and not job.done.wait(timeout):
                raise TimeoutError(
                    f"{self.pending} deferred tokens are still pending after {timeout} s; "
                    "their restoration goes on"
                )
            self.complete()

    def close(self) -> None:
        """Stop and free everything; closing twice is harmless.

        Background work stops within one chunk. A call that is using the cache fails at its next
        pass. A closed cache cannot be used again.
        """
        self.closed = True
        self.withdraw()
        if self._use.acquire(blocking=False):  # else the call in progress frees it on its way out
            try:
                self._free()
            finally:
                self._use.release()

    def rewind(self) -> None:
        """Go back to before a turn that broke off; nothing to do after one that returned.

        A turn that had dropped the last answer (its ids parted inside it) goes back to the end of
        the input before that answer.

        Raises:
            ValueError: The cache is closed, or in use by a call.
        """
        with self.in_use():
            if self.broken_off is not None:
                self.withdraw()
                before, self.broken_off = self.broken_off, None
                self.conversation, self.last_token = before.conversation, before.last_token
                self.report = before.report

    def fork(self) -> RaincheckCache:
        """An independent conversation that starts where this one is, without its ``on_progress``.

        Raises:
            ValueError: The cache is closed, or in use by a call.
            Exception: What the background raised, once.
        """
        with self.in_use():
            error = self.withdraw()
            if error is not None:
                raise error
            twin = RaincheckCache(self.model)
            twin.buffers = {i: buffer.copy() for i, buffer in self.buffers.items()}
            twin.conversation = self.conversation
            twin.last_token, twin.broken_off = self.last_token, self.broken_off
            twin.report = None if self.report is None else self.report.copy()
            twin._rest = self._rest
            if self._rest[0].completion == "background":
                self.complete_in_background()
                twin.complete_in_background()
            return twin

    # -- what a turn needs --------------------------------------------------------------------

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Claim the cache for one call.

        Raises:
            ValueError: It is closed, or another call has it.
        """
        if not self._use.acquire(blocking=False):
            raise ValueError(
                "this RaincheckCache is in use by another call; a conversation runs one turn at a "
                "time (fork() makes an independent one)"
            )
        try:
            if self.closed:
                raise ValueError("this RaincheckCache is closed; start with RaincheckCache(model)")
            yield
        finally:
            if self.closed:
                self._free()
            self._use.release()

    def publish(self, conversation: Conversation) -> None:
        """Make a pass's outcome the conversation's state.

        Raises:
            ValueError: The cache was closed meanwhile; nothing is published.
        """
        if self.closed:
            raise ValueError("this RaincheckCache was closed while it was in use")
        before, now = self.conversation.regions, conversation.regions
        self.conversation = conversation
        if self.report is not None:
            self.report.pending = now.pending
        if (
            self.on_progress is not None
            and now.past == before.past
            and now.restored > before.restored
        ):
            in_answer = self.turn is not None and self.turn.report is self.report
            phase: Phase = "decode" if in_answer else "completion"
            self.on_progress(Progress(now.restored, now.deferred, phase))

    def open_turn(
        self, before: Conversation, conversation: Conversation, report: RaincheckReport
    ) -> None:
        """Publish the prefill of a new turn.

        Args:
            before: Where to go back to, should the turn break off.
            conversation: What it is now.
            report: The turn's report.
        """
        again = self.broken_off is not None and before is self.broken_off.conversation
        if not again:  # else a second try, behind the same conversation as the first
            # A last token belongs to the answer behind which it stands.
            dropped = before.regions.answer < self.conversation.regions.answer
            last_token = None if dropped else self.last_token
            self.broken_off = BrokenOff(before, last_token, self.report)
        self.report, self.last_token = report, None
        self.publish(conversation)

    def close_turn(self, last_token: int) -> None:
        """The turn has returned; its last token belongs to the next one's input."""
        self.last_token, self.broken_off = last_token, None

    def history_for(self, ids: Tensor, mask: Tensor | None) -> Conversation:
        """What a call goes on from: the conversation, or what it was before a broken-off turn.

        Args:
            ids: int64 [1, L], as passed.
            mask: [1, n] or None; longer than ``ids`` for new tokens alone.
        """
        if self.broken_off is None or (mask is not None and mask.shape[1] > ids.shape[1]):
            return self.conversation
        prompt = self.conversation.prompt_ids
        behind = ids.shape[1] > len(prompt) and torch.equal(ids[0, : len(prompt)].cpu(), prompt)
        return self.conversation if behind else self.broken_off.conversation

    def complete_with(self, config: RaincheckConfig, executor: Executor) -> None:
        """Say how what is left of D will be restored."""
        self._rest = (config, executor)

    def complete_in_background(self) -> None:
        """Let the model's worker restore what is left of D; returns at once."""
        if self.pending:
            self._job = completer(self.model).submit(self)

    @torch.no_grad()
    def complete(self) -> None:
        """The barrier of a call that holds the cache: restore all that is left of D here and now.

        Raises:
            Exception: What the background raised, once.
        """
        error = self.withdraw()
        if error is not None:
            raise error
        while self.pending:
            self.restore_chunk(chunks=_BARRIER_CHUNKS)

    def restore_chunk(self, ready: Callable[[], None] | None = None, chunks: int = 1) -> None:
        """Restore completion chunks in one pass. The caller owns the conversation.

        Args:
            ready: Called between the pass and its publication, to wait for the device.
            chunks: How many.
        """
        config, executor = self._rest
        chunk = min(self.pending, chunks * config.completion_chunk_size)
        device = self.conversation.deferred.device
        start = mark(device)
        passes.restore(self, executor, chunk, ready)
        if self.report is not None:
            spent = start.until(mark(device))
            self.report.completion_ms = (self.report.completion_ms or 0.0) + spent

    def withdraw(self) -> BaseException | None:
        """Take the conversation back from the worker; returns what the worker raised.

        Afterwards nothing but the caller changes the conversation.
        """
        job, self._job = self._job, None
        if job is None:
            return None
        completer(self.model).withdraw(job)
        adopt_tensors(self.conversation)
        return job.error

    def _free(self) -> None:
        self.conversation = Conversation()
        self.last_token = self.broken_off = None
        for buffer in self.buffers.values():
            buffer.free()

    # -- what stock code asks of a Cache ------------------------------------------------------

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.get_seq_length()} tokens"
        return f"RaincheckCache({state}, {self.pending} pending)"

    def __deepcopy__(self, memo: dict[int, Any]) -> RaincheckCache:
        return self.fork()

    def __copy__(self) -> RaincheckCache:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "RaincheckCache cannot be pickled: it holds its model. Save cache.token_ids and the "
            "pictures, and run the conversation again"
        )

    @property
    def is_linear(self) -> list[bool]:
        return [kind == "recurrent" for kind in self.layers]

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.layers)

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    @property
    def batch_size(self) -> int:
        return 1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "a RaincheckCache works inside model.generate(..., raincheck=...) only; "
            "for stock generation or a plain forward pass use a DynamicCache"
        )

    update = get_mask_sizes = get_query_offset = _refused
    get_conv_state = get_recurrent_state = _refused
    update_conv_state = update_recurrent_state = update_indexer = _refused
    crop = reset = reorder_cache = early_initialization = offload = prefetch = _refused
    batch_repeat_interleave = batch_select_indices = activate_past_recording = _refused
