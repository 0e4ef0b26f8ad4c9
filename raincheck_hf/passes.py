"""The three kinds of pass over a conversation: initial prefill, decode, restoration.

Each builds the pass, runs it, and publishes the conversation that follows in one assignment; a
pass that raises leaves the conversation as it was (rule 13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raincheck_hf.buffers import Rows
from raincheck_hf.conversation import Conversation
from raincheck_hf.executor import Executor, Pass
from raincheck_hf.regions import Group
from raincheck_hf.report import RaincheckReport

if TYPE_CHECKING:
    from raincheck_hf.cache import RaincheckCache


def prefill(
    cache: RaincheckCache,
    executor: Executor,
    initial: Rows,
    after: Conversation,
    report: RaincheckReport,
    reserve: int,
) -> Tensor:
    """Prefill P in source order; the last row gives y1 (rule 3).

    Args:
        cache: The conversation.
        executor: What runs the pass.
        initial: Rows of P.
        after: What the conversation becomes, but for its recurrent states.
        report: The new turn's report.
        reserve: Slots to allocate at least.

    Returns:
        Logits [1, vocabulary].
    """
    result = executor.run(
        cache.model,
        Pass(
            rows=initial,
            groups=(after.regions.initial_group(),),
            recurrent=after.recurrent,
            opening=True,
            reserve=reserve,
        ),
        cache.buffers,
    )
    cache.publish(after.after(result.recurrent), report)
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
        positions=torch.full((3, 1), now.position, device=embeds.device),
        visual=torch.zeros(1, dtype=torch.bool, device=embeds.device),
    )
    groups: tuple[Group, ...] = (now.regions.decode_group(),)
    if chunk:
        rows = Rows.cat([now.deferred.peek(chunk), rows])
        groups = (now.regions.chunk_group(chunk), *groups)
    result = executor.run(
        cache.model,
        Pass(rows, groups, now.recurrent, record=now.regions.pending > 0),
        cache.buffers,
    )
    cache.publish(now.after(result.recurrent, restored=chunk, token=token))
    assert result.logits is not None
    return result.logits


def restore(cache: RaincheckCache, executor: Executor, chunk: int) -> None:
    """Restore the next ``chunk`` deferred tokens without a decode row."""
    now = cache.conversation
    work = Pass(
        now.deferred.peek(chunk),
        (now.regions.chunk_group(chunk),),
        now.recurrent,
        wants_logits=False,
    )
    result = executor.run(cache.model, work, cache.buffers)
    cache.publish(now.after(result.recurrent, restored=chunk))
