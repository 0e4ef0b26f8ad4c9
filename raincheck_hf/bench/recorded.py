"""What the recurrent layers of a model read in a long stream, recorded from a plain forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raincheck_hf.bench.subjects import Subject
from raincheck_hf.kernels.suffix_map import Convolution, delta_step
from raincheck_hf.models import adapter_for
from raincheck_hf.recurrent import Checkpoint, Factors


@dataclass(frozen=True)
class Recorded:
    """One layer's share of a stream of T tokens.

    Attributes:
        conv: The layer's convolution, fp32.
        factors: The tokens' pre-convolution inputs, bf16 [C, T], with g and beta, fp32 [T, HV].
    """

    conv: Convolution
    factors: Factors

    def part(self, start: int, stop: int) -> Factors:
        """The tokens from ``start`` to ``stop``."""
        own = self.factors
        return Factors(own.inputs[:, start:stop], own.g[start:stop], own.beta[start:stop])

    def beginning(self) -> Checkpoint:
        """Before the first token."""
        conv, inputs = self.conv, self.factors.inputs
        state = torch.zeros(conv.value_heads, conv.key_dim, conv.value_dim, device=inputs.device)
        return Checkpoint(state, inputs.new_zeros(len(inputs), conv.reach))

    def replayed(
        self, start: Checkpoint, tokens: Factors, dtype: torch.dtype = torch.float32
    ) -> Checkpoint:
        """Run tokens one by one from a checkpoint, with states of ``dtype``."""
        keys, values = self.conv.keys_values(start.history, tokens.inputs)
        state = start.state.to(dtype)
        steps = zip(keys, values, tokens.g, tokens.beta, strict=True)
        for step in steps:
            state = delta_step(state, *(factor.to(dtype) for factor in step))
        return start.advanced(state, tokens.inputs)


@torch.no_grad()
def record(subject: Subject, length: int, seed: int) -> dict[int, Recorded]:
    """Run a stream through the model, and keep what its recurrent layers read.

    Args:
        subject: The model.
        length: Tokens.
        seed: Fixes the stream.

    Returns:
        By layer.

    Raises:
        ValueError: The model has no recurrent layers.
    """
    model = subject.model
    adapter = adapter_for(model)
    mixers = adapter.recurrent_modules(model)
    if not mixers:
        raise ValueError(f"{subject.name!r} has no recurrent layers, and so no suffix maps")
    with ExitStack() as stack:
        hidden = {i: stack.enter_context(_rows_into(mixer)) for i, mixer in mixers.items()}
        mixed = {i: stack.enter_context(_rows_from(mixer)) for i, mixer in mixers.items()}
        model.model(**subject.stream(length, seed), use_cache=False)
    found = {}
    for i, mixer in mixers.items():
        g, beta = adapter.factors(mixer, hidden[i][0][0, :length])
        inputs = mixed[i][0][0, :length].T.to(torch.bfloat16)
        found[i] = Recorded(_in_fp32(adapter.convolution(mixer)), Factors(inputs, g, beta))
    return found


def _in_fp32(conv: Convolution) -> Convolution:
    bias = None if conv.bias is None else conv.bias.float()
    return Convolution(
        conv.weight.float(), bias, conv.key_heads, conv.key_dim, conv.value_heads, conv.value_dim
    )


@contextmanager
def _rows_into(mixer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the rows [1, T, d] that a mixer is called with."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handle = mixer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _rows_from(mixer: Any) -> Iterator[list[Tensor]]:
    """Collect the pre-convolution inputs [1, T, C] that a mixer makes of its rows."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.append(output)

    handle = mixer.in_proj_qkv.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()
