"""What tests of wrappers share: two turns on a model, and that two models answer alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_turns import LAZY, ask, assert_close, go_on, logits_of

BLOCKING = {**LAZY, "completion": "blocking"}


def two_turns(model: Any, inputs: Any, raincheck: Any = None) -> tuple[Any, Any]:
    """An answer, and the answer to a follow-up, whose barrier restores the rest."""
    first = ask(model, inputs, raincheck)
    second = ask(model, go_on(model, inputs, first), raincheck, cache=first.cache)
    return first, second


def assert_alike(a: tuple[Any, Any], b: tuple[Any, Any], atol: float = 1e-4) -> None:
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert_close(logits_of(one), logits_of(other), atol)


def get_peft() -> Any:
    """The library, or the test is skipped."""
    return pytest.importorskip("peft", reason="adapters need peft")


def with_lora(model: Any, **more: Any) -> Any:
    """LoRA on every linear layer, recurrent mixers and the vision tower included."""
    peft = get_peft()
    fields = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **more}
    return peft.get_peft_model(model, peft.LoraConfig(**fields)).eval()
