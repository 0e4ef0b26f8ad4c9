"""Bad input: a clear error before the language model runs, and a cache that is as good as before.

Each case changes one thing in the second turn of a conversation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_turns import (
    LAZY,
    Inputs,
    answer_of,
    ask,
    assert_same,
    counted_passes,
    go_on,
    logits_of,
    model_of,
    only_new,
)
from reference import random_inputs, random_model
from transformers import (
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
    StaticCache,
)

from raincheck_hf import (
    RaincheckCache,
    RaincheckConfig,
    RaincheckGenerationMixin,
    enable_raincheck,
)

Call = dict[str, Any]
Change = Callable[[Any, Call], None]


@cache
def first_turn(architecture: str) -> SimpleNamespace:
    """A turn with an image, a good second turn with another one, and what that gives."""
    model = model_of(architecture)
    inputs = random_inputs(model, 1, "one image")
    out = ask(model, inputs)
    follow = go_on(model, inputs, out, [("text", 3), ("image", 3, 2), ("text", 3)])
    out.cache.finish()
    good = ask(model, follow, cache=out.cache.fork())
    return SimpleNamespace(inputs=inputs, out=out, follow=follow, good=good)


# What can be wrong: a change to the second turn's call, the error, and what its message says.


def setting(**kwargs: Any) -> Change:
    return lambda model, call: call.update(kwargs)


def chosen(**fields: Any) -> Change:
    return lambda model, call: call.update(raincheck={**LAZY, **fields})


def raises(context: Any) -> None:
    raise KeyError("lost my weights")


def edited(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda model, call: call.update({name: change(call[name])})


def without(*names: str) -> Change:
    return lambda model, call: [call.pop(name) for name in names]


def left_padding(model: Any, call: Call) -> None:
    for name, value in (("input_ids", 0), ("attention_mask", 0)):
        call[name] = torch.nn.functional.pad(call[name], (1, 0), value=value)


def batch_of_two(model: Any, call: Call) -> None:
    for name in ("input_ids", "attention_mask"):
        call[name] = call[name].repeat(2, 1)


def static_cache(model: Any, call: Call) -> None:
    call["cache"] = StaticCache(config=model.config.get_text_config(), max_cache_len=64)


def filled_dynamic_cache(model: Any, call: Call) -> None:
    text = random_inputs(model, 2, "text only")
    call["cache"] = model.generate(
        **text, max_new_tokens=2, return_dict_in_generate=True
    ).past_key_values


def cache_of_another_model(model: Any, call: Call) -> None:
    other = random_model(model.config.model_type, seed=5)  # same weights even
    call["cache"] = RaincheckCache(other)


def both_caches(model: Any, call: Call) -> None:
    call["past_key_values"] = call["cache"]


def other_token(at: int) -> Change:
    def change(model: Any, call: Call) -> None:
        call["input_ids"] = call["input_ids"].clone()
        call["input_ids"][0, at] = (call["input_ids"][0, at] + 1) % 100

    return change


def other_picture(pixel: float) -> Change:
    """The old picture, with one value changed."""

    def change(model: Any, call: Call) -> None:
        call["pixel_values"] = call["pixel_values"].clone()
        call["pixel_values"][2, 5] = pixel

    return change


def turned_picture(model: Any, call: Call) -> None:
    """The old picture has as many patches, in another shape."""
    call["image_grid_thw"] = call["image_grid_thw"].clone()
    call["image_grid_thw"][0] = call["image_grid_thw"][0, [0, 2, 1]]


def swapped_pictures(model: Any, call: Call) -> None:
    """New pixels where the old ones were: as many of them as there were, in wrong order."""
    first = int(call["image_grid_thw"][0].prod())
    pixels = call["pixel_values"]
    call["pixel_values"] = torch.cat([pixels[first:], pixels[:first]])
    call["image_grid_thw"] = call["image_grid_thw"].flip(0)


def placeholders(model: Any, count: int) -> torch.Tensor:
    return torch.full((1, count), model.config.image_token_id)


def one_placeholder_less(model: Any, call: Call) -> None:
    ids = call["input_ids"]
    last = int((ids[0] == model.config.image_token_id).nonzero()[-1])
    call["input_ids"] = torch.cat([ids[:, :last], ids[:, last + 1 :]], 1)
    call["attention_mask"] = torch.ones_like(call["input_ids"])


def one_placeholder_more(model: Any, call: Call) -> None:
    ids = call["input_ids"]
    last = int((ids[0] == model.config.image_token_id).nonzero()[-1])
    call["input_ids"] = torch.cat([ids[:, :last], placeholders(model, 1), ids[:, last:]], 1)
    call["attention_mask"] = torch.ones_like(call["input_ids"])


def no_placeholders_at_all(model: Any, call: Call) -> None:
    ids = call["input_ids"].clone()
    start = call["cache"].get_seq_length()
    ids[0, start:][ids[0, start:] == model.config.image_token_id] = 5
    call["input_ids"] = ids


def placeholders_without_picture(model: Any, call: Call) -> None:
    call["input_ids"] = torch.cat([call["input_ids"], placeholders(model, 6)], 1)
    call["input_ids"] = torch.cat([call["input_ids"], torch.tensor([[4]])], 1)
    del call["attention_mask"]


def video_without_pixels(model: Any, call: Call) -> None:
    ids = torch.tensor([[model.config.video_token_id] * 6 + [4]])
    call["input_ids"] = torch.cat([call["input_ids"], ids], 1)
    del call["attention_mask"]


def video_grid_of_other_frames(model: Any, call: Call) -> None:
    new = random_inputs(model, 3, "one video")
    call["input_ids"] = torch.cat([call["input_ids"], new["input_ids"]], 1)
    call["pixel_values_videos"] = new["pixel_values_videos"]
    call["video_grid_thw"] = new["video_grid_thw"].clone()
    call["video_grid_thw"][0] = call["video_grid_thw"][0, [1, 0, 2]]
    del call["attention_mask"]


def embeddings(model: Any, call: Call) -> None:
    call["inputs_embeds"] = model.get_input_embeddings()(call["input_ids"]).detach()


def embeddings_alone(model: Any, call: Call) -> None:
    call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids")).detach()


def cut(model: Any, call: Call) -> None:
    for name in ("input_ids", "attention_mask"):
        call[name] = call[name][:, :9]


def new_tokens_without_the_last_one(model: Any, call: Call) -> None:
    call["input_ids"] = call["input_ids"][:, call["cache"].get_seq_length() + 1 :]


BAD: dict[str, tuple[Change, type[Exception], tuple[str, ...]]] = {
    # The config
    "retention 0": (chosen(retention=0), ValueError, ("retention", "(0, 1]", "0")),
    "retention 1.2": (chosen(retention=1.2), ValueError, ("retention", "(0, 1]", "1.2")),
    "retention NaN": (chosen(retention=float("nan")), ValueError, ("retention", "nan")),
    "chunk 0": (chosen(chunk_size=0), ValueError, ("chunk_size", "1 to 511", "0")),
    "unknown selector": (chosen(selector="best"), ValueError, ("'best'", "mmtok", "uniform")),
    "unknown field": (chosen(chunks=3), ValueError, ("'chunks'", "chunk_size", "retention")),
    "raincheck=0.3": (setting(raincheck=0.3), TypeError, ("raincheck=", "RaincheckConfig")),
    "fused executor": (chosen(executor="fused"), ValueError, ("fused", "modules")),
    # The selector
    "scores too short": (
        chosen(selector=lambda context: torch.zeros(context.n - 1)), ValueError, ("[6]", "[5]"),
    ),
    "scores with a batch": (
        chosen(selector=lambda context: torch.zeros(1, context.n)), ValueError, ("[6]", "[1, 6]"),
    ),
    "NaN scores": (
        chosen(selector=lambda context: torch.full((context.n,), float("nan"))),
        ValueError, ("selector", "NaN"),
    ),
    "a selector that raises": (
        chosen(selector=raises), ValueError, ("raises", "KeyError", "lost my weights"),
    ),
    "an empty mask": (
        chosen(selector=lambda context: torch.zeros(context.n, dtype=torch.bool)),
        ValueError, ("selector", "at least one"),
    ),
    "scores in a list": (
        chosen(selector=lambda context: [0.0] * context.n), TypeError, ("tensor", "list"),
    ),
    "indices for scores": (
        chosen(selector=lambda context: torch.arange(context.n)), TypeError, ("float", "int64"),
    ),
    # What stock generate offers and this does not
    "num_beams": (setting(num_beams=2), ValueError, ("num_beams", "2", "stock")),
    "num_beams in an object": (
        setting(generation_config=GenerationConfig(num_beams=2)), ValueError, ("num_beams", "2"),
    ),
    "num_return_sequences": (
        setting(num_return_sequences=2, do_sample=True), ValueError, ("num_return_sequences", "2"),
    ),
    "assistant": (
        lambda model, call: call.update(assistant_model=model),
        ValueError, ("assistant_model", "stock"),
    ),
    "prompt lookup": (
        setting(prompt_lookup_num_tokens=2), ValueError, ("prompt_lookup_num_tokens", "2"),
    ),
    "contrastive": (
        setting(penalty_alpha=0.6, top_k=4), ValueError, ("penalty_alpha", "0.6", "contrastive"),
    ),
    "DoLa": (setting(dola_layers="low"), ValueError, ("dola_layers", "low")),
    "static": (
        setting(cache_implementation="static"), ValueError, ("cache_implementation", "static"),
    ),
    "dynamic": (
        setting(cache_implementation="dynamic"), ValueError, ("cache_implementation", "dynamic"),
    ),
    "paged": (
        setting(cache_implementation="paged"), ValueError, ("cache_implementation", "paged"),
    ),
    "use_cache=False": (setting(use_cache=False), ValueError, ("use_cache",)),
    "prefill_chunk_size": (
        setting(prefill_chunk_size=4), ValueError, ("prefill_chunk_size", "4"),
    ),
    "guidance_scale": (setting(guidance_scale=1.5), ValueError, ("guidance_scale", "1.5")),
    "negative prompt": (
        setting(negative_prompt_ids=torch.tensor([[1, 2, 3]])),
        ValueError, ("negative_prompt_ids",),
    ),
    "token_healing": (setting(token_healing=True), ValueError, ("token_healing",)),
    "custom_generate, a name": (
        setting(custom_generate="someone/loop"), ValueError, ("custom_generate",),
    ),
    "custom_generate, a function": (
        setting(custom_generate=lambda *args, **kwargs: None), ValueError, ("custom_generate",),
    ),
    "synced_gpus": (setting(synced_gpus=True), ValueError, ("synced_gpus",)),
    "output_attentions": (setting(output_attentions=True), ValueError, ("output_attentions",)),
    "output_hidden_states": (
        setting(output_hidden_states=True), ValueError, ("output_hidden_states",),
    ),
    "a typo": (setting(max_new_token=3), ValueError, ("max_new_token",)),
    "two typos": (setting(temprature=3, foo=1), ValueError, ("temprature", "foo")),
    "max_length in the past": (
        setting(max_new_tokens=None, max_length=3), ValueError, ("max_length", "3"),
    ),
    "max_new_tokens=0": (setting(max_new_tokens=0), ValueError, ("max_new_tokens", "0")),
    "position_ids": (
        setting(position_ids=torch.zeros(3, 1, 4)), ValueError, ("position_ids", "leave it out"),
    ),
    # Tokens
    "batch of 2": (batch_of_two, ValueError, ("one sequence", "[2, ")),
    "left padding": (left_padding, ValueError, ("padding",)),
    "one axis": (edited("input_ids", lambda ids: ids[0]), ValueError, ("input_ids",)),
    "float ids": (edited("input_ids", torch.Tensor.float), TypeError, ("input_ids", "float32")),
    "a list of ids": (edited("input_ids", torch.Tensor.tolist), TypeError, ("input_ids", "list")),
    "no ids": (edited("input_ids", lambda ids: ids[:, :0]), ValueError, ("empty",)),
    "no input_ids": (without("input_ids"), TypeError, ("input_ids",)),
    "ids beyond the vocabulary": (
        edited("input_ids", lambda ids: ids.where(ids != ids[0, -1], 128)),
        ValueError, ("127", "128"),
    ),
    "negative ids": (
        edited("input_ids", lambda ids: ids.where(ids != ids[0, -1], -1)),
        ValueError, ("127", "-1"),
    ),
    "a mask too short": (
        edited("attention_mask", lambda mask: mask[:, 1:]), ValueError, ("attention_mask",),
    ),
    "a mask of no use": (
        edited("attention_mask", lambda mask: torch.ones(1, mask.shape[1] + 7)),
        ValueError, ("attention_mask",),
    ),
    "a mask in a list": (
        edited("attention_mask", torch.Tensor.tolist), TypeError, ("attention_mask", "list"),
    ),
    "embeddings": (embeddings, ValueError, ("inputs_embeds", "input_ids")),
    "embeddings alone": (embeddings_alone, ValueError, ("inputs_embeds", "input_ids")),
    # The cache
    "StaticCache": (static_cache, ValueError, ("StaticCache", "RaincheckCache")),
    "a DynamicCache in use": (filled_dynamic_cache, ValueError, ("DynamicCache",)),
    "a legacy cache": (setting(cache=((1, 2),)), TypeError, ("tuple", "RaincheckCache")),
    "cache of another model": (cache_of_another_model, ValueError, ("another model",)),
    "two caches": (both_caches, ValueError, ("cache", "past_key_values", "not both")),
    "another first token": (other_token(0), ValueError, ("token 0", "start with a new cache")),
    "another token in the turn": (other_token(3), ValueError, ("token 3", "cache.token_ids")),
    "cut before the last answer": (cut, ValueError, ("token 9", "ends")),
    "new tokens, not the last generated": (
        new_tokens_without_the_last_one, ValueError, ("get_seq_length",),
    ),
    # Pictures
    "another picture, grid and all": (swapped_pictures, ValueError, ("image 0", "another picture")),
    "one value changed": (other_picture(0.123), ValueError, ("image 0", "pixels")),
    "a NaN in it": (other_picture(float("nan")), ValueError, ("image 0", "pixels")),
    "another size": (turned_picture, ValueError, ("image 0", "size")),
    "no grid": (without("image_grid_thw"), ValueError, ("pixel_values", "image_grid_thw")),
    "no pixels": (without("pixel_values"), ValueError, ("1 new image", "pixel_values")),
    "no pictures": (
        without("pixel_values", "image_grid_thw"), ValueError, ("1 new image", "pixel_values"),
    ),
    "a patch too many": (
        edited("pixel_values", lambda pixels: torch.cat([pixels, pixels[:1]])),
        ValueError, ("image_grid_thw", "patches"),
    ),
    "a grid of one axis": (
        edited("image_grid_thw", torch.Tensor.flatten), ValueError, ("image_grid_thw", "[6]"),
    ),
    "a grid in a list": (
        edited("image_grid_thw", torch.Tensor.tolist), TypeError, ("image_grid_thw", "list"),
    ),
    "one placeholder less": (one_placeholder_less, ValueError, ("placeholders", "[5]", "[6]")),
    "one placeholder more": (one_placeholder_more, ValueError, ("placeholders", "[7]", "[6]")),
    "no placeholders": (no_placeholders_at_all, ValueError, ("placeholders", "0 new")),
    "placeholders alone": (placeholders_without_picture, ValueError, ("placeholders",)),
    "a video without pixels": (
        video_without_pixels, ValueError, ("video", "pixel_values_videos"),
    ),
    "a video of other frames": (
        video_grid_of_other_frames, ValueError, ("video", "placeholders"),
    ),
}  # fmt: skip


def bad_call(model: Any, name: str, first: SimpleNamespace, own: RaincheckCache) -> Call:
    call: Call = {**first.follow, "cache": own}
    BAD[name][0](model, call)
    return call


def assert_refused(model: Any, name: str, call: Call) -> None:
    """The right error, with everything in its message, and no pass of the language model."""
    with counted_passes(model) as passes, pytest.raises(BAD[name][1]) as error:
        ask(model, call)
    assert passes == []
    message = str(error.value)
    assert all(word in message for word in BAD[name][2]), message


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_and_nothing_is_lost(architecture, name):
    model, first = model_of(architecture), first_turn(architecture)
    own = first.out.cache.fork()
    length, ids = own.get_seq_length(), own.token_ids.clone()

    assert_refused(model, name, bad_call(model, name, first, own))

    assert own.get_seq_length() == length
    assert torch.equal(own.token_ids, ids)
    assert_same(ask(model, first.follow, cache=own), first.good)


@pytest.mark.parametrize(
    "name",
    [
        "num_beams", "retention 0", "NaN scores", "a typo", "max_length in the past",
        "another first token", "one value changed", "one placeholder less", "no pixels",
    ],
)  # fmt: skip
def test_the_language_model_does_not_run_while_tokens_are_pending(architecture, name):
    model, first = model_of(architecture), first_turn(architecture)
    waiting = ask(model, first.inputs).cache
    pending = waiting.pending
    assert pending
    assert_refused(model, name, bad_call(model, name, first, waiting))
    assert waiting.pending == pending
    assert_same(ask(model, first.follow, cache=waiting), first.good)


@pytest.mark.parametrize("name", ["num_beams", "a typo", "NaN scores"])
def test_an_error_leaves_the_report_of_the_last_good_turn(architecture, name):
    model, first = model_of(architecture), first_turn(architecture)
    own = ask(model, first.inputs).cache
    report = model.raincheck_report
    assert own.report is report
    assert_refused(model, name, bad_call(model, name, first, own))
    assert own.report is report
    assert model.raincheck_report is report


@pytest.mark.parametrize("layout", ["one image", "one video", "image, video, image"])
def test_the_first_turn_needs_every_picture(architecture, layout):
    model = model_of(architecture)
    inputs = random_inputs(model, 3, layout)
    for name in ("pixel_values", "pixel_values_videos"):
        if name in inputs:
            less = {key: value for key, value in inputs.items() if key != name}
            with counted_passes(model) as passes, pytest.raises(ValueError, match=name):
                ask(model, less)
            assert passes == []


def test_a_video_needs_its_grid(architecture):
    model = model_of(architecture)
    inputs = random_inputs(model, 3, "one video")
    del inputs["video_grid_thw"]
    with pytest.raises(ValueError, match=r"pixel_values_videos.*video_grid_thw"):
        ask(model, inputs)


def test_an_input_without_anything_new_is_refused(architecture):
    model, first = model_of(architecture), first_turn(architecture)
    own = first.out.cache.fork()
    consumed = {"input_ids": own.token_ids[None]}
    with counted_passes(model) as passes, pytest.raises(ValueError, match="new"):
        ask(model, consumed, cache=own)
    with pytest.raises(ValueError, match="new"):
        ask(model, first.inputs, cache=own)
    assert passes == []
    assert_same(ask(model, first.follow, cache=own), first.good)


# The model


def test_training_mode_is_refused(architecture):
    model, first = model_of(architecture), first_turn(architecture)
    own = first.out.cache.fork()
    model.train()
    try:
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            ask(model, first.follow, cache=own)
    finally:
        model.eval()
    assert_same(ask(model, first.follow, cache=own), first.good)


def test_other_attention_is_refused(architecture, monkeypatch):
    model, first = model_of(architecture), first_turn(architecture)
    config = model.config.get_text_config()
    monkeypatch.setattr(config, "_attn_implementation_internal", "flex_attention")
    with pytest.raises(ValueError, match=r"sdpa.*eager.*'flex_attention'"):
        ask(model, first.inputs)


def text_model() -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        )
    )  # fmt: skip


@pytest.mark.parametrize("build", [text_model, lambda: torch.nn.Linear(2, 2), object])
@pytest.mark.parametrize("use", [enable_raincheck, RaincheckCache])
def test_an_unsupported_model_is_told_the_supported_ones(build, use):
    model = build()
    with pytest.raises(ValueError, match=r"supported: qwen2_5_vl, qwen3_5, .*qwen3_vl") as error:
        use(model)
    assert type(model).__name__ in str(error.value)


def test_the_inner_model_is_not_enough(architecture):
    with pytest.raises(ValueError, match="AutoModelForImageTextToText"):
        enable_raincheck(model_of(architecture).model)


@pytest.mark.parametrize("found", ["4.57.0", "5.23.9", "5.25.0", "6.0.0"])
def test_other_transformers_are_refused(monkeypatch, found):
    model = random_model("qwen3_vl")
    before = set(model.__dict__)
    monkeypatch.setattr("raincheck_hf._compat.installed", lambda: found)
    with pytest.raises(ValueError, match=r"transformers.*pip install") as error:
        enable_raincheck(model)
    assert found in str(error.value)
    assert "5.24.0" in str(error.value)
    assert set(model.__dict__) == before


@pytest.mark.parametrize("found", ["5.24.0", "5.24.7"])
def test_tested_transformers_are_taken(monkeypatch, found):
    monkeypatch.setattr("raincheck_hf._compat.installed", lambda: found)
    enable_raincheck(random_model("qwen3_vl"))


@pytest.mark.parametrize("config", [{"retention": 0.5}, True, 0.5])
def test_the_default_config_is_a_config(config):
    with pytest.raises(TypeError, match="RaincheckConfig"):
        enable_raincheck(random_model("qwen3_vl"), config)


# The cache


@pytest.fixture
def turn(architecture):
    """A second turn on a cache of its own, and what has to come out."""
    first = first_turn(architecture)
    return SimpleNamespace(model=model_of(architecture), own=first.out.cache.fork(), **vars(first))


def refused_once(turn: SimpleNamespace, use: Callable[[], Any]) -> list[Exception]:
    """Run the turn, call ``use`` from inside its first step, and check the turn's outcome."""
    errors: list[Exception] = []

    def processor(ids: Any, scores: Any) -> Any:
        if not errors:
            try:
                use()
            except Exception as error:
                errors.append(error)
            else:
                pytest.fail("the cache was let to a second call")
        return scores

    out = ask(turn.model, turn.follow, cache=turn.own, logits_processor=[processor])
    assert_same(out, turn.good)
    return errors


def uses(turn: SimpleNamespace) -> dict[str, Callable[[], Any]]:
    return {
        "generate": lambda: ask(turn.model, turn.follow, cache=turn.own),
        "finish": turn.own.finish,
        "fork": turn.own.fork,
    }


@pytest.mark.parametrize("use", ["generate", "finish", "fork"])
def test_a_cache_in_use_is_refused_from_inside_the_call(turn, use):
    (error,) = refused_once(turn, uses(turn)[use])
    assert isinstance(error, ValueError)
    assert "in use" in str(error)


@pytest.mark.parametrize("use", ["generate", "finish", "fork"])
def test_a_cache_in_use_is_refused_from_another_thread(turn, use):
    def in_thread() -> None:
        found: list[Exception] = []

        def work() -> None:
            try:
                uses(turn)[use]()
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if found:
            raise found[0]

    (error,) = refused_once(turn, in_thread)
    assert isinstance(error, ValueError)
    assert "in use" in str(error)


def test_closing_a_cache_in_use_is_an_error_not_rubbish(turn):
    def processor(ids: Any, scores: Any) -> Any:
        turn.own.close()
        return scores

    with pytest.raises(ValueError, match=r"in use|closed"):
        ask(turn.model, turn.follow, cache=turn.own, logits_processor=[processor])


def test_a_closed_cache_is_refused(turn):
    turn.own.close()
    turn.own.close()
    for use in uses(turn).values():
        with counted_passes(turn.model) as passes, pytest.raises(ValueError, match="closed"):
            use()
        assert passes == []


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("raincheck", [None, False])
def test_a_raincheck_cache_without_raincheck_is_refused(turn, name, raincheck):
    with counted_passes(turn.model) as passes, pytest.raises(ValueError, match="raincheck=True"):
        turn.model.generate(**turn.follow, **{name: turn.own}, raincheck=raincheck)
    assert passes == []
    assert_same(ask(turn.model, turn.follow, cache=turn.own), turn.good)


def test_a_raincheck_cache_in_a_plain_forward_is_refused(turn):
    with pytest.raises(ValueError, match="generate"):
        turn.model(**turn.follow, cache=turn.own)
    with pytest.raises(ValueError, match="generate"):
        turn.model.model.language_model(input_ids=torch.tensor([[3]]), cache=turn.own)
    assert_same(ask(turn.model, turn.follow, cache=turn.own), turn.good)


def test_a_model_that_is_not_enabled_refuses_the_cache(turn):
    stock = random_model(turn.model.config.model_type, seed=5)
    with pytest.raises(ValueError, match="RaincheckCache"):
        stock.generate(**turn.inputs, cache=RaincheckCache(stock), max_new_tokens=2)


def test_a_model_that_is_not_enabled_refuses_raincheck(architecture):
    stock = random_model(architecture, seed=5)
    with pytest.raises(ValueError, match="raincheck"):
        stock.generate(**random_inputs(stock, 1), raincheck=True, max_new_tokens=2)


def test_an_error_in_a_users_hook_is_his_and_the_cache_goes_on(turn):
    """Rule 13: what was published stays; the turn can be asked again."""

    def processor(ids: Any, scores: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ask(turn.model, turn.follow, cache=turn.own, logits_processor=[processor])
    later = torch.cat([turn.follow["input_ids"], torch.tensor([[7, 8, 9]])], 1)
    out = ask(turn.model, {"input_ids": later}, cache=turn.own)
    assert len(answer_of({"input_ids": later}, out)) == 4


def test_a_turn_that_broke_off_can_be_asked_again(turn):
    """The natural retry: the same call once more."""

    def processor(ids: Any, scores: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ask(turn.model, turn.follow, cache=turn.own, logits_processor=[processor])
    assert_same(ask(turn.model, turn.follow, cache=turn.own), turn.good)


def failing(module: torch.nn.Module) -> Any:
    def fail(*args: Any) -> None:
        raise MemoryError("none left")

    return module.register_forward_pre_hook(fail)


@pytest.mark.parametrize("rollback", [False, True])
def test_a_failed_prefill_leaves_what_was_there(turn, rollback):
    """Rule 13, also where the answer's slots are about to be written again (rule 14)."""
    call: Inputs = dict(turn.follow)
    if rollback:
        call["input_ids"] = call["input_ids"].clone()
        at = turn.inputs["input_ids"].shape[1] + 1
        call["input_ids"][0, at] = (call["input_ids"][0, at] + 1) % 100
    handle = failing(turn.model.lm_head)
    try:
        with pytest.raises(MemoryError):
            ask(turn.model, call, cache=turn.own)
    finally:
        handle.remove()
    assert_same(ask(turn.model, turn.follow, cache=turn.own), turn.good)


def test_a_failed_restoration_can_be_tried_again(architecture):
    model, first = model_of(architecture), first_turn(architecture)
    own = ask(model, first.inputs).cache
    pending = own.pending
    handle = failing(model.model.language_model.layers[-1])
    try:
        with pytest.raises(MemoryError):
            own.finish()
    finally:
        handle.remove()
    assert own.pending == pending
    own.finish()
    assert own.pending == 0
    assert_same(ask(model, first.follow, cache=own), first.good)


def test_new_tokens_alone_after_an_error_still_fit(turn):
    with pytest.raises(ValueError, match="num_beams"):
        ask(turn.model, turn.follow, cache=turn.own, num_beams=2)
    fresh = only_new(turn.follow, turn.own)
    first = int(turn.inputs["image_grid_thw"].prod())
    fresh["pixel_values"] = turn.follow["pixel_values"][first:]
    fresh["image_grid_thw"] = turn.follow["image_grid_thw"][1:]
    out = ask(turn.model, fresh, cache=turn.own)
    assert torch.equal(logits_of(out), logits_of(turn.good))


def test_the_mixin_checks_transformers_too(monkeypatch):
    class Mine(RaincheckGenerationMixin, Qwen3VLForConditionalGeneration):
        pass

    model = Mine(model_of("qwen3_vl").config).eval()
    monkeypatch.setattr("raincheck_hf._compat.installed", lambda: "5.25.0")
    with pytest.raises(ValueError, match="transformers"):
        ask(model, random_inputs(model, 1), RaincheckConfig(completion="lazy"))
