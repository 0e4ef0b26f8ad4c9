"""PEFT models: adapters answer as when merged; what looks at the whole prompt is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_turns import ask, assert_same, logits_of, model_of
from helpers_wrappers import BLOCKING, assert_alike, get_peft, two_turns, with_lora
from reference import random_inputs, random_model

from raincheck_hf import (
    RaincheckCache,
    RaincheckConfig,
    RaincheckSession,
    disable_raincheck,
    enable_raincheck,
    tiny,
)


@pytest.fixture
def peft() -> Any:
    return get_peft()


@pytest.fixture
def stock(architecture: str) -> Any:
    """A model of its own, never enabled."""
    return random_model(architecture, seed=5)


@pytest.fixture
def inputs(stock: Any) -> Any:
    return random_inputs(stock, 1, "one image")


@pytest.mark.parametrize("enabled", ["inner, before", "inner, after", "outer"])
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_adapter_answers_as_when_merged(
    peft: Any, architecture: str, stock: Any, inputs: Any, enabled: str, task: str | None
) -> None:
    if enabled == "inner, before":
        enable_raincheck(stock)
    adapted = with_lora(stock, task_type=task)
    if enabled != "inner, before":
        model = adapted if enabled == "outer" else stock
        assert enable_raincheck(model) is model
    through_adapter = two_turns(adapted, inputs)
    assert adapted.raincheck_report is through_adapter[1].raincheck
    base = logits_of(ask(model_of(architecture), inputs))
    assert (logits_of(through_adapter[0]) - base).abs().max() > 0.01, "the adapter did nothing"
    assert_alike(through_adapter, two_turns(adapted.merge_and_unload(), inputs))


def test_an_adapter_on_embeddings_and_a_head_of_its_own(peft: Any, stock: Any, inputs: Any) -> None:
    fields = {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]}
    adapted = enable_raincheck(with_lora(stock, **fields))
    first = two_turns(adapted, inputs)
    assert_alike(first, two_turns(adapted.merge_and_unload(), inputs))


@pytest.mark.parametrize("method", ["DoRA", "IA3"])
def test_other_methods_that_adapt_layers(peft: Any, stock: Any, inputs: Any, method: str) -> None:
    if method == "DoRA":
        adapted = with_lora(stock, use_dora=True)
    else:
        names = {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
        config = peft.IA3Config(**names, init_ia3_weights=False)
        adapted = peft.get_peft_model(stock, config).eval()
    first = two_turns(enable_raincheck(adapted), inputs)
    assert_alike(first, two_turns(adapted.merge_and_unload(), inputs))


def test_another_adapter_in_another_turn(peft: Any, architecture: str, stock: Any, inputs: Any):
    """Adapters are switched between turns, and off; what was pending is restored before."""
    adapted = enable_raincheck(with_lora(stock))
    adapted.add_adapter("second", peft.LoraConfig(r=4, target_modules="all-linear",
                                                  init_lora_weights=False))  # fmt: skip
    first = two_turns(adapted, inputs, BLOCKING)
    adapted.set_adapter("second")
    second = two_turns(adapted, inputs, BLOCKING)
    assert (logits_of(first[0]) - logits_of(second[0])).abs().max() > 0.01
    with adapted.disable_adapter():
        assert_alike(
            two_turns(adapted, inputs, BLOCKING), two_turns(model_of(architecture), inputs)
        )
    adapted.set_adapter("default")
    assert_alike(two_turns(adapted, inputs, BLOCKING), first, atol=0)


def test_a_cache_and_disable_look_through_wrappers(peft: Any, stock: Any, inputs: Any) -> None:
    compiled = torch.compile(stock, backend="eager")
    before = {name: dict(module.__dict__) for name, module in stock.named_modules()}
    enable_raincheck(compiled)
    assert RaincheckCache(compiled).model is stock
    assert disable_raincheck(compiled) is compiled
    assert {name: dict(module.__dict__) for name, module in stock.named_modules()} == before
    adapted = with_lora(stock)
    enable_raincheck(adapted)
    cache = RaincheckCache(adapted)
    assert ask(adapted, inputs, cache=cache).cache is cache
    disable_raincheck(adapted)
    assert "generate" not in vars(stock)
    with pytest.raises(ValueError, match="raincheck"):
        ask(adapted, inputs)


def test_a_session_with_a_peft_model(peft: Any) -> None:
    model, processor = tiny.load("qwen3_vl")
    board = tiny.make_board(8, 8, rng=2)
    question, answer = board.ask_row(2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).eval()
    session = RaincheckSession(adapted, processor, RaincheckConfig(selector="uniform"))
    session.ask("What is in D5?", images=[board.image()], max_new_tokens=4)
    assert session.ask(question, max_new_tokens=12) == answer


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_soft_prompts_are_refused(peft: Any, kind: str) -> None:
    model = random_model("qwen3_vl", seed=5)
    config = getattr(peft, kind)(
        task_type="CAUSAL_LM", num_virtual_tokens=4, num_layers=4, token_dim=64,
        num_attention_heads=4,
    )  # fmt: skip
    adapted = enable_raincheck(peft.get_peft_model(model, config).eval())
    with pytest.raises(ValueError, match="prompt-learning"):
        ask(adapted, random_inputs(model, 1, "one image"))


def test_an_activated_lora_is_refused(peft: Any, stock: Any, inputs: Any) -> None:
    fields = {"target_modules": ["q_proj"], "alora_invocation_tokens": [5, 6]}
    adapted = enable_raincheck(with_lora(stock, task_type="CAUSAL_LM", **fields))
    with pytest.raises(ValueError, match="aLoRA"):
        ask(adapted, inputs)


def test_xlora_is_refused(peft: Any, stock: Any, inputs: Any) -> None:
    """By the config that it leaves on the model."""
    enable_raincheck(stock)
    stock.peft_config = {"default": peft.XLoraConfig(hidden_size=64, adapters={})}
    with pytest.raises(ValueError, match="X-LoRA"):
        ask(stock, inputs)


def test_adapters_for_one_call_are_refused_and_leave_nothing(
    peft: Any, stock: Any, inputs: Any
) -> None:
    adapted = enable_raincheck(with_lora(stock))
    wanted = ask(adapted, inputs)
    with pytest.raises(ValueError, match="adapter_names=.*set_adapter"):
        ask(adapted, inputs, adapter_names=["default"])
    assert not any(module._forward_pre_hooks for module in stock.modules())
    assert_same(ask(adapted, inputs), wanted)
