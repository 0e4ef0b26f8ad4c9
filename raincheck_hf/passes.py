"""The three kinds of pass over a conversation: initial prefill, decode, restoration.

Each builds the pass, runs it, and publishes the conversation that follows in one assignment; a
pass that raises leaves the conversation as it was (rule 13).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raincheck_hf.buffers import DeferredRows, Rows, Span
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.conversation import Conversation
from raincheck_hf.executor import Executor, Pass, PassResult, Token
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
    rest: Callable[[], DeferredRows],
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
        rest: Makes D's rows. Called when the pass is under way, so that they do not hold it up;
            what it raises, the pass does.

    Returns:
        Logits [1, vocabulary].
    """
    work = Pass(
        spans=(Span(initial, 0, len(initial)),),
        token=None,
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
        deferred = rest()
    except BaseException:
        for i, (keys, values) in dropped.items():
            cache.buffers[i].write(start, keys, values, reserve=stop)
        raise
    opened = replace(after.after(result.recurrent), deferred=deferred)
    cache.open_turn(before, opened, report)
    assert result.logits is not None
    return result.logits


def decode(
    cache: RaincheckCache, executor: Executor, token: Tensor, chunk: int, config: RaincheckConfig
) -> Tensor:
    """Consume one generated token, restoring ``chunk`` deferred tokens in the same pass.

    The chunk is visible from the next pass on (rule 6), so the serial form runs it second.

    Args:
        cache: The conversation.
        executor: What runs the pass.
        token: int64 [1].
        chunk: Deferred tokens to restore, 0 or more.
        config: Whether chunk and token share one pass, and how large chunks are.

    Returns:
        Logits [1, vocabulary] of the token's row.
    """
    if chunk and not config.fuse:
        logits = decode(cache, executor, token, 0, config)
        restore(cache, executor, chunk, chunk_size=config.chunk_size)
        return logits
    now = cache.conversation
    groups: tuple[Group, ...] = (now.regions.decode_group(),)
    if chunk:
        groups = (now.regions.chunk_group(chunk), *groups)
    work = Pass(
        spans=now.deferred.peek(chunk),
        token=Token(token, now.answer_position + now.regions.answer),
        groups=groups,
        recurrent=now.recurrent,
        record=now.regions.pending > 0,
        chunk_size=config.chunk_size,
    )
    result = _attempt(cache, executor, work, smallest=chunk == 0)
    if result is None:
        return decode(cache, executor, token, chunk // 2, config)
    cache.publish(now.after(result.recurrent, restored=chunk, token=token))
    assert result.logits is not None
    return result.logits


def restore(
    cache: RaincheckCache,
    executor: Executor,
    chunk: int,
    ready: Callable[[], None] | None = None,
    chunk_size: int = 0,
) -> None:
    """Restore the next ``chunk`` deferred tokens without a decode row.

    Args:
        cache: The conversation.
        executor: What runs the pass.
        chunk: Deferred tokens; where memory runs out they are restored in smaller parts.
        ready: Called between the pass and its publication.
        chunk_size: As in ``Pass``, where passes of this shape come again and again.

    Raises:
        torch.OutOfMemoryError: One token at a time does not fit either; says what to lower.
    """
    now = cache.conversation
    result = _attempt(
        cache,
        executor,
        Pass(
            spans=now.deferred.peek(chunk),
            token=None,
            groups=(now.regions.chunk_group(chunk),),
            recurrent=now.recurrent,
            wants_logits=False,
            chunk_size=chunk_size,
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
