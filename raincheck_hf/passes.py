"""The three kinds of pass over a conversation: initial prefill, decode, restoration.

Each builds the pass, runs it, and publishes the conversation that follows in one assignment; a
pass that raises leaves the conversation as it was (rule 13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raincheck_hf.buffers import Rows
from raincheck_hf.conversation import Conversation
from raincheck_hf.executor import Executor, Pass, PassResult
from raincheck_hf.regions import Group
from raincheck_hf.report import RaincheckReport
from raincheck_hf.turnstile import turnstile

if TYPE_CHECKING:
    from raincheck_hf.cache import RaincheckCache


def prefill(
    cache: RaincheckCache,
    executor: Executor,
    initial: Rows,
    before: Conversation,
    after: Conversation,
    report: RaincheckReport,
    reserve: int,
) -> Tensor:
    """Prefill P in source order; the last row gives y1 (rule 3).

    Args:
        cache: The conversation.
        executor: What runs the pass.
        initial: Rows of P.
        before: What the turn goes on from.
        after: What the conversation becomes, but for its recurrent states.
        report: The new turn's report.
        reserve: Slots to allocate at least.

    Returns:
        Logits [1, vocabulary].
    """
    work = Pass(
        rows=initial,
        groups=(after.regions.initial_group(),),
        recurrent=after.recurrent,
        opening=True,
        reserve=reserve,
    )
    # A turn that rolls back writes over the answer that it drops; a failure brings it back.
    start, stop = after.regions.past, cache.conversation.regions.end
    dropped = (
        {i: buffer.saved(start, stop) for i, buffer in cache.buffers.items()}
        if start < stop
        else {}
    )
    try:
        result = _run(cache, executor, work)
    except BaseException:
        for i, (keys, values) in dropped.items():
            cache.buffers[i].write(start, keys, values, reserve=stop)
        raise
    cache.open_turn(before, after.after(result.recurrent), report)
    assert result.logits is not None
    return result.logits


def decode(
    cache: RaincheckCache, executor: Executor, token: Tensor, chunk: int, fuse: bool
) -> Tensor:
    """Consume one generated token, restoring ``chunk`` deferred tokens in the same pass.

    The chunk is visible from the next pass on (rule 6), so the serial form runs it second.

    Args:
        cache: The conversation.
        executor: What runs the pass.
        token: int64 [1].
        chunk: Deferred tokens to restore, 0 or more.
        fuse: Whether chunk and token share one pass.

    Returns:
        Logits [1, vocabulary] of the token's row.
    """
    if chunk and not fuse:
        logits = decode(cache, executor, token, 0, fuse=True)
        restore(cache, executor, chunk)
        return logits
    now = cache.conversation
    embeds = cache.adapter.embed(cache.model, token)
    rows = Rows(
        embeds=embeds,
        positions=(now.answer_position + now.regions.answer)[:, None].to(embeds.device),
        visual=torch.zeros(1, dtype=torch.bool, device=embeds.device),
    )
    groups: tuple[Group, ...] = (now.regions.decode_group(),)
    if chunk:
        rows = Rows.cat([now.deferred.peek(chunk), rows])
        groups = (now.regions.chunk_group(chunk), *groups)
    result = _attempt(
        cache,
        executor,
        Pass(rows, groups, now.recurrent, record=now.regions.pending > 0),
        smallest=chunk == 0,
    )
    if result is None:
        return decode(cache, executor, token, chunk // 2, fuse)
    cache.publish(now.after(result.recurrent, restored=chunk, token=token))
    assert result.logits is not None
    return result.logits


def restore(
    cache: RaincheckCache,
    executor: Executor,
    chunk: int,
    ready: Callable[[], None] | None = None,
) -> None:
    """Restore the next ``chunk`` deferred tokens without a decode row.

    Args:
        cache: The conversation.
        executor: What runs the pass.
        chunk: Deferred tokens; where memory runs out they are restored in smaller parts.
        ready: Called between the pass and its publication.

    Raises:
        torch.OutOfMemoryError: One token at a time does not fit either; says what to lower.
    """
    now = cache.conversation
    result = _attempt(
        cache,
        executor,
        Pass(
            now.deferred.peek(chunk),
            (now.regions.chunk_group(chunk),),
            now.recurrent,
            wants_logits=False,
        ),
        smallest=chunk == 1,
    )
    if result is None:
        restore(cache, executor, chunk // 2, ready)
        restore(cache, executor, chunk - chunk // 2, ready)
        return
    if ready is not None:
        ready()
    cache.publish(now.after(result.recurrent, restored=chunk))


def _run(cache: RaincheckCache, executor: Executor, work: Pass) -> PassResult:
    """One pass at a time on a model, first come, first served."""
    with turnstile(cache.model):
        return executor.run(cache.model, work, cache.buffers)


def _attempt(
    cache: RaincheckCache, executor: Executor, work: Pass, smallest: bool
) -> PassResult | None:
    """Run a pass; None where memory ran out and a smaller one can be tried.

    The caller retries after this returned, when the failed pass's tensors are gone.

    Raises:
        torch.OutOfMemoryError: The pass was the smallest there is; says what to lower.
    """
    try:
        return _run(cache, executor, work)
    except torch.OutOfMemoryError as error:
        if smallest:
            raise torch.OutOfMemoryError(
                "out of memory even in the smallest pass; lower retention, chunk_size or "
                "completion_chunk_size, shorten the conversation, or close() others. What was "
                "restored before is still valid"
            ) from error
        return None
