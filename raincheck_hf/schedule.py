"""Which chunk rides in which pass. Plain Python, no tensors."""

from __future__ import annotations

from raincheck_hf.config import RaincheckConfig


def decode_chunk(config: RaincheckConfig, step: int, pending: int) -> int:
    """How many deferred tokens ride in the pass that consumes y_step.

    The passes of y_1 to y_g are plain (the guard); from y_{g+1} on each carries one chunk until
    nothing is pending (paper section 2.3).

    Args:
        config: The turn's choices.
        step: t, counted from 1.
        pending: Deferred tokens not yet restored.
    """
    if config.defer != "decode" or step <= config.guard_tokens:
        return 0
    return min(config.chunk_size, pending)
