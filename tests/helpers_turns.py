"""Turns on small random models, and ways to look at what they did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from reference import next_turn, random_inputs, random_model
from torch import Tensor

from raincheck_hf import enable_raincheck

torch.set_num_threads(1)  # rows of one are too small to share among threads

Inputs = dict[str, Tensor]

LAZY = {
    "retention": 0.3,
    "selector": "uniform",
    "chunk_size": 2,
    "guard_tokens": 1,
    "completion": "lazy",
}
"""A turn of few tokens leaves some deferred tokens behind."""


@cache
def model_of(architecture: str) -> Any:
    """One enabled model an architecture, shared by tests that leave it as it was."""
    return enable_raincheck(random_model(architecture, seed=5))


def ask(model: Any, inputs: Mapping[str, Any], raincheck: Any = None, **kwargs: Any) -> Any:
    """One greedy turn that returns everything there is, unless told otherwise."""
    settings = {
        "raincheck": LAZY if raincheck is None else raincheck,
        "max_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    return model.generate(**{**settings, **inputs, **kwargs})


def logits_of(out: Any) -> Tensor:
    """[tokens, vocabulary]."""
    return torch.cat(out.logits)


def answer_of(inputs: Mapping[str, Tensor], out: Any) -> list[int]:
    """The generated tokens."""
    sequences = getattr(out, "sequences", out)
    return sequences[0, inputs["input_ids"].shape[1] :].tolist()


def go_on(
    model: Any,
    inputs: Mapping[str, Tensor],
    out: Any,
    layout: str | Sequence[tuple] = (("text", 5),),
    seed: int = 9,
) -> Inputs:
    """The whole conversation after ``out``, with random new input behind it."""
    return next_turn(inputs, answer_of(inputs, out), random_inputs(model, seed, layout))


def only_new(inputs: Mapping[str, Tensor], cache: Any) -> Inputs:
    """The new tokens of a whole conversation, without pixels."""
    return {"input_ids": inputs["input_ids"][:, cache.get_seq_length() :]}


@contextmanager
def counted_passes(model: Any) -> Iterator[list[int]]:
    """A list that gets the number of rows of every pass of the language model."""
    rows: list[int] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows.append(kwargs["inputs_embeds"].shape[1])

    handle = model.model.language_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def assert_same(a: Any, b: Any) -> None:
    """Equal tokens and logits."""
    assert torch.equal(a.sequences, b.sequences)
    torch.testing.assert_close(logits_of(a), logits_of(b), atol=0, rtol=0)


def assert_close(a: Tensor, b: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(a.float(), b.float(), atol=atol, rtol=0)
