"""enable_raincheck touches one instance, and disable_raincheck leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from helpers_turns import LAZY, ask, assert_close, assert_same, go_on, logits_of, model_of
from reference import random_inputs, random_model

from raincheck_hf import (
    RaincheckCache,
    RaincheckConfig,
    RaincheckGenerationMixin,
    disable_raincheck,
    enable_raincheck,
)


@pytest.fixture
def stock(architecture):
    """A model of its own, never enabled."""
    return random_model(architecture, seed=5)


@pytest.fixture
def inputs(stock):
    return random_inputs(stock, 1, "one image")


@pytest.fixture
def wanted(architecture, inputs):
    """What the shared enabled model answers."""
    return ask(model_of(architecture), inputs)


def stock_answer(model: Any, inputs: Any) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=4, do_sample=False)


def attributes(model: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def hooked(model: Any, hook: Any = AlignDevicesHook) -> Any:
    for module in model.modules():
        add_hook_to_module(module, hook("cpu") if hook is AlignDevicesHook else hook())
    return model


def files_of(model: Any, folder: Path) -> dict[str, bytes]:
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_it_returns_the_same_object_and_is_idempotent(stock, inputs, wanted):
    kind = type(stock)
    assert enable_raincheck(stock) is stock
    once = {name: set(own) for name, own in attributes(stock).items()}
    assert enable_raincheck(enable_raincheck(stock)) is stock
    assert {name: set(own) for name, own in attributes(stock).items()} == once
    assert type(stock) is kind
    assert_same(ask(stock, inputs), wanted)


def test_disable_undoes_several_enables(stock, inputs):
    answer = stock_answer(stock, inputs)
    before = attributes(stock)
    for _ in range(3):
        enable_raincheck(stock)
    ask(stock, inputs)
    assert disable_raincheck(stock) is stock
    assert attributes(stock) == before
    assert torch.equal(stock_answer(stock, inputs), answer)
    with pytest.raises(ValueError, match="raincheck"):
        ask(stock, inputs)


def test_it_can_be_enabled_again(stock, inputs, wanted):
    disable_raincheck(enable_raincheck(stock))
    assert_same(ask(enable_raincheck(stock), inputs), wanted)


def test_disabling_what_was_never_enabled_is_harmless(stock):
    before = attributes(stock)
    assert disable_raincheck(disable_raincheck(stock)) is stock
    assert attributes(stock) == before


def test_disabling_any_other_model_is_harmless():
    other = torch.nn.Linear(2, 2)
    assert disable_raincheck(other) is other


def test_an_enabled_model_is_saved_as_before(stock, inputs, tmp_path):
    before = files_of(stock, tmp_path / "before")
    keys = list(stock.state_dict())
    enable_raincheck(stock, RaincheckConfig(retention=0.5))
    ask(stock, inputs)
    assert list(stock.state_dict()) == keys
    assert files_of(stock, tmp_path / "enabled") == before
    disable_raincheck(stock)
    assert files_of(stock, tmp_path / "disabled") == before


def test_hooks_and_modules_stay(stock, inputs):
    hooks = [len(module._forward_hooks) for module in stock.modules()]
    names = [name for name, _ in stock.named_modules()]
    ask(enable_raincheck(stock), inputs)
    assert [len(module._forward_hooks) for module in stock.modules()] == hooks
    assert [len(module._forward_pre_hooks) for module in stock.modules()] == hooks
    assert [name for name, _ in stock.named_modules()] == names


def test_only_this_instance_changes(stock, inputs, architecture):
    twin = random_model(architecture, seed=5)
    enable_raincheck(stock)
    with pytest.raises(ValueError, match="raincheck"):
        ask(twin, inputs)
    assert "generate" not in vars(twin)
    assert "raincheck" not in type(stock).generate.__code__.co_varnames


@pytest.mark.parametrize("choice", [None, False])
def test_without_raincheck_an_enabled_model_is_stock(stock, inputs, choice):
    settings = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    before = stock.generate(**inputs, **settings)
    after = enable_raincheck(stock).generate(**inputs, **settings, raincheck=choice)
    assert_same(after, before)
    assert type(after) is type(before)
    assert type(after.cache) is type(before.cache)


def test_the_signatures_stay(stock):
    before = [inspect.signature(stock.generate), inspect.signature(stock.forward)]
    enable_raincheck(stock)
    assert [inspect.signature(stock.generate), inspect.signature(stock.forward)] == before
    assert stock.can_generate()


def test_a_config_is_kept_until_another_is_given(stock, inputs):
    enable_raincheck(stock, RaincheckConfig(**{**LAZY, "retention": 0.5}))
    assert ask(stock, inputs, True).raincheck.n_selected == 6
    enable_raincheck(stock)
    assert ask(stock, inputs, True).raincheck.n_selected == 6
    assert ask(stock, inputs, {"retention": 0.25}).raincheck.n_selected == 3
    enable_raincheck(stock, RaincheckConfig(**{**LAZY, "retention": 0.25}))
    assert ask(stock, inputs, True).raincheck.n_selected == 3


def test_importing_changes_nothing():
    code = """
import torch, transformers
from transformers import Qwen3VLForConditionalGeneration as A
from transformers import Qwen3_5ForConditionalGeneration as B
from transformers import DynamicCache, GenerationMixin
from transformers.models.qwen3_5 import modeling_qwen3_5 as five
from transformers.models.qwen3_vl import modeling_qwen3_vl as three
classes = [torch.nn.Module, GenerationMixin, DynamicCache, *A.__mro__, *B.__mro__]
classes += [x for m in (five, three) for x in vars(m).values() if isinstance(x, type)]
classes = [c for c in dict.fromkeys(classes) if c is not object]
def look():
    return [dict(vars(c)) for c in classes] + [dict(vars(five)), dict(vars(three))]
state = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
before = look()
import raincheck_hf
for old, new in zip(before, look()):
    assert old.keys() == new.keys()
    assert all(old[name] is new[name] for name in old)
assert torch.equal(state[0], torch.get_rng_state())
assert state[1:] == (torch.get_num_threads(), torch.is_grad_enabled())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Copies


def test_a_deep_copy_is_independent(stock, inputs, wanted):
    enable_raincheck(stock, RaincheckConfig(**LAZY))
    twin = copy.deepcopy(stock)
    assert twin.generate.__self__ is twin
    disable_raincheck(stock)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.zero_()
    out = ask(twin, inputs, True)
    assert_same(out, wanted)
    assert out.cache.model is twin
    assert "raincheck_report" not in vars(stock)


def test_a_copys_cache_is_not_the_models(stock, inputs):
    enable_raincheck(stock)
    twin = copy.deepcopy(stock)
    out = ask(twin, inputs)
    with pytest.raises(ValueError, match="another model"):
        ask(stock, go_on(stock, inputs, out), cache=out.cache)


def with_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def with_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("load", [with_pickle, with_torch_save])
def test_unpickling_gives_stock_that_can_be_enabled_again(stock, inputs, wanted, load):
    answer = stock_answer(stock, inputs)
    enable_raincheck(stock)
    ask(stock, inputs)
    twin = load(stock)
    assert type(twin) is type(stock)
    assert torch.equal(stock_answer(twin, inputs), answer)
    with pytest.raises(ValueError, match="raincheck"):
        ask(twin, inputs)
    assert_same(ask(enable_raincheck(twin), inputs), wanted)
    assert_same(ask(stock, inputs), wanted)
    disable_raincheck(twin)
    assert torch.equal(stock_answer(twin, inputs), answer)
    assert not {"generate", "forward"} & set(vars(twin))


# accelerate


def test_a_model_hooked_before(stock, inputs, wanted):
    answer = stock_answer(stock, inputs)
    hooked(stock)
    before = attributes(stock)
    enable_raincheck(stock)
    for _ in range(2):
        assert_same(ask(stock, inputs), wanted)
    assert torch.equal(stock_answer(stock, inputs), answer)
    disable_raincheck(stock)
    assert attributes(stock) == before
    assert torch.equal(stock_answer(stock, inputs), answer)


def test_the_hooks_of_a_hooked_model_run(stock, inputs):
    seen = []

    class Count(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    hooked(stock, Count)
    ask(enable_raincheck(stock), inputs)
    layers = [name for name in seen if name.endswith("TextDecoderLayer") or "DecoderLayer" in name]
    assert len(layers) >= 4 * len(stock.model.language_model.layers)
    assert "Linear" in seen


@pytest.mark.parametrize("only_outside", [False, True])
def test_a_model_hooked_afterwards(stock, inputs, wanted, only_outside):
    answer = stock_answer(stock, inputs)
    enable_raincheck(stock)
    if only_outside:
        add_hook_to_module(stock, ModelHook())
    else:
        hooked(stock)
    for _ in range(2):
        assert torch.equal(stock_answer(stock, inputs), answer)
        assert_same(ask(stock, inputs), wanted)
    with pytest.raises(RuntimeError, match="wrapped after enable_raincheck"):
        disable_raincheck(stock)
    assert_same(ask(stock, inputs), wanted)


def test_enabling_again_after_a_hook_is_idempotent(stock, inputs, wanted):
    answer = stock_answer(stock, inputs)
    hooked(enable_raincheck(stock))
    enable_raincheck(stock)
    assert torch.equal(stock_answer(stock, inputs), answer)
    assert_same(ask(stock, inputs), wanted)


def test_hooks_can_be_removed_and_the_model_disabled(stock, inputs, wanted):
    answer, before = stock_answer(stock, inputs), attributes(stock)
    hooked(enable_raincheck(stock))
    for module in stock.modules():
        remove_hook_from_module(module)
    assert_same(ask(stock, inputs), wanted)
    disable_raincheck(stock)
    after = attributes(stock)
    assert {name: set(own) - {"forward"} for name, own in after.items()} == (
        {name: set(own) for name, own in before.items()}
    )
    assert torch.equal(stock_answer(stock, inputs), answer)


@pytest.mark.parametrize("enable_first", [False, True])
def test_an_offloaded_model(stock, inputs, wanted, enable_first):
    """Its weights are on "meta" until a hook brings them in."""
    if enable_first:
        enable_raincheck(stock)
    cpu_offload(stock, torch.device("cpu"))
    assert_same(ask(enable_raincheck(stock), inputs), wanted)


# Inheriting


def mixed(architecture: str, **body: Any) -> Any:
    shared = model_of(architecture)
    kind = type("Mine", (RaincheckGenerationMixin, type(shared)), body)
    model = kind(shared.config).eval()
    model.load_state_dict(shared.state_dict())
    return model


def test_the_mixin_answers_as_an_enabled_model(architecture, inputs, wanted):
    model = mixed(architecture)
    out = ask(model, inputs)
    assert_same(out, wanted)
    follow = go_on(model, inputs, out)
    assert_same(
        ask(model, follow, cache=out.cache),
        ask(model_of(architecture), follow, cache=wanted.cache),
    )


def test_the_mixin_without_raincheck_is_stock(architecture, stock, inputs):
    assert torch.equal(stock_answer(mixed(architecture), inputs), stock_answer(stock, inputs))


def test_the_mixin_in_a_grandchild(architecture, inputs, wanted):
    model = mixed(architecture)
    model.__class__ = type("Grandchild", (type(model),), {})
    assert_same(ask(model, inputs), wanted)


def test_a_default_config_for_the_mixin(architecture, inputs):
    model = mixed(architecture)
    assert ask(model, inputs, True).raincheck.n_selected == 4
    enable_raincheck(model, RaincheckConfig(**{**LAZY, "retention": 0.5}))
    assert ask(model, inputs, True).raincheck.n_selected == 6
    disable_raincheck(model)
    assert ask(model, inputs, True).raincheck.n_selected == 4


def test_the_mixin_under_a_forward_of_its_own(architecture, inputs, wanted):
    """A class that overrides forward and calls super() keeps raincheck."""
    parent = type(model_of(architecture))
    calls = []

    class Mine(RaincheckGenerationMixin, parent):
        @functools.wraps(parent.forward)
        def forward(self, *args, **kwargs):
            calls.append(1)
            return super().forward(*args, **kwargs)

    model = Mine(model_of(architecture).config).eval()
    model.load_state_dict(model_of(architecture).state_dict())
    assert_same(ask(model, inputs), wanted)
    assert len(calls) == 4


def test_the_mixin_loads_what_was_saved(architecture, inputs, wanted, tmp_path):
    model_of(architecture).save_pretrained(tmp_path)
    kind = type("Mine", (RaincheckGenerationMixin, type(model_of(architecture))), {})
    model = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    out = ask(model, inputs)
    assert torch.equal(out.sequences, wanted.sequences)
    assert_close(logits_of(out), logits_of(wanted))


def test_a_mixins_cache_deepcopy_and_hooks(architecture, inputs, wanted):
    model = copy.deepcopy(hooked(mixed(architecture)))
    assert_same(ask(model, inputs, cache=RaincheckCache(model)), wanted)
    assert_same(ask(model, inputs), wanted)
