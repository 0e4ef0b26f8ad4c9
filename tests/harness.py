"""Running the package and the independent reference on the same conversation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from reference import Prompt, Reference, prompt_from_inputs, random_model
from torch import Tensor

from raincheck_hf import RaincheckCache, RaincheckConfig, RaincheckOutput, enable_raincheck


@cache
def enabled_model(architecture: str, seed: int = 5, **text: Any) -> torch.nn.Module:
    """A random model with long-memory recurrent layers, enabled. Shared: do not change it."""
    return enable_raincheck(random_model(architecture, seed=seed, text=text))


def run_turn(
    model: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    config: RaincheckConfig,
    new_tokens: int,
    cache: RaincheckCache | None = None,
) -> RaincheckOutput:
    """One greedy turn of exactly ``new_tokens`` tokens, with logits."""
    return model.generate(
        **inputs,
        raincheck=config,
        cache=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def answer_of(out: RaincheckOutput, inputs: Mapping[str, Tensor]) -> list[int]:
    """The generated tokens."""
    return out.sequences[0, inputs["input_ids"].shape[1] :].tolist()


def prompt_of(
    model: torch.nn.Module, inputs: Mapping[str, Tensor], out: Any, start: int = 0
) -> Prompt:
    """The reference's prompt with the selection that the package reported."""
    report = out.raincheck
    prompt = prompt_from_inputs(model, inputs, report.selected, start=start)
    order = (report.deferred - start).tolist()
    return Prompt(**{**vars(prompt), "order": order})


def follow(reference: Reference, prompt: Prompt, tokens: list[int], out: RaincheckOutput) -> Tensor:
    """The reference's logits of the same answer under the same schedule, [T, vocab]."""
    logits = [reference.prefill(prompt)]
    for token, chunk in zip(tokens[:-1], out.raincheck.restored_per_step, strict=True):
        logits.append(reference.decode(token, chunk))
    return torch.stack(logits)


def logits_of(out: RaincheckOutput) -> Tensor:
    """[T, vocab]."""
    return torch.cat(out.logits)


def distance(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference, in float64."""
    return float((left.double() - right.double()).abs().max())
