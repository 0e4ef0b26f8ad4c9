"""Conversations: one cache handed from turn to turn."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_turns import (
    LAZY,
    Inputs,
    answer_of,
    ask,
    assert_close,
    assert_same,
    counted_passes,
    go_on,
    logits_of,
    model_of,
    only_new,
)
from reference import next_turn, random_inputs
from transformers import DynamicCache

from raincheck_hf import RaincheckCache

IMAGE = [("text", 3), ("image", 3, 2), ("text", 3)]
VIDEO = [("text", 2), ("video", 2, 2, 2), ("text", 3)]
TEXT = [("text", 5)]


@pytest.fixture
def model(architecture):
    return model_of(architecture)


@pytest.fixture
def talk(model):
    """A first turn about an image, with some of it pending, and a second one about another."""
    inputs = random_inputs(model, 1, "one image")
    out = ask(model, inputs)
    return SimpleNamespace(inputs=inputs, out=out, cache=out.cache, follow=go_on(
        model, inputs, out, IMAGE))  # fmt: skip


def stock(model: Any, inputs: Inputs) -> Any:
    return model.generate(
        **inputs, max_new_tokens=4, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip


def new_pictures(talk: SimpleNamespace) -> Inputs:
    """The second turn's picture without the first one's."""
    old = int(talk.inputs["image_grid_thw"].prod())
    return {
        "pixel_values": talk.follow["pixel_values"][old:],
        "image_grid_thw": talk.follow["image_grid_thw"][1:],
    }


# Lengths and ids


def test_the_logical_length_counts_tokens_restored_or_not(model, talk):
    length = talk.inputs["input_ids"].shape[1]
    cache = talk.cache
    assert cache.pending > 0
    assert cache.get_seq_length() == length + 3
    assert torch.equal(cache.token_ids, talk.out.sequences[0, :-1])
    assert repr(cache) == f"RaincheckCache({length + 3} tokens, {cache.pending} pending)"
    cache.finish()
    assert cache.pending == talk.out.raincheck.pending == 0
    assert cache.get_seq_length() == length + 3
    assert torch.equal(cache.token_ids, talk.out.sequences[0, :-1])


def test_dropped_tokens_count_too(model):
    inputs = random_inputs(model, 1, "one image")
    out = ask(model, inputs, {**LAZY, "defer": "never"})
    assert out.cache.pending == out.raincheck.pending == 0
    assert out.raincheck.n_deferred > 0
    assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
    follow = go_on(model, inputs, out, IMAGE)
    assert ask(model, follow, cache=out.cache).raincheck.n_visual == 6


def test_an_empty_cache():
    cache = RaincheckCache(model_of("qwen3_vl"))
    assert cache.get_seq_length() == cache.pending == len(cache.token_ids) == 0
    assert cache.report is None
    cache.finish()
    assert not cache.closed


# Ways to pass the next turn


def ways(talk: SimpleNamespace) -> dict[str, Inputs]:
    new, pictures = only_new(talk.follow, talk.cache), new_pictures(talk)
    ids = {"input_ids": talk.follow["input_ids"]}
    mask = {"attention_mask": talk.follow["attention_mask"]}
    return {
        "old pixels left out": {**talk.follow, **pictures},
        "ids and pixels": {**ids, **pictures},
        "ids and all pixels": {**talk.follow, **ids},
        "new tokens": {**new, **pictures},
        "new tokens, long mask": {**new, **mask, **pictures},
        "new tokens, long mask, all pixels": {**talk.follow, **new},
        "new tokens, their mask": {
            **new, "attention_mask": torch.ones_like(new["input_ids"]), **pictures,
        },
    }  # fmt: skip


def test_every_way_to_pass_a_turn_gives_the_same(model, talk):
    want = ask(model, talk.follow, cache=talk.cache.fork())
    for name, inputs in ways(talk).items():
        out = ask(model, inputs, cache=talk.cache.fork())
        assert torch.equal(logits_of(out), logits_of(want)), name
        assert answer_of(inputs, out) == answer_of(talk.follow, want), name
        assert torch.equal(out.cache.token_ids, want.cache.token_ids), name
        places = out.raincheck.selected, out.raincheck.deferred
        for place in places:
            assert bool((inputs["input_ids"][0, place] == model.config.image_token_id).all())
        assert sum(map(len, places)) == 6


def test_past_key_values_is_cache(model, talk):
    want = ask(model, talk.follow, cache=talk.cache.fork())
    own = talk.cache.fork()
    out = ask(model, talk.follow, past_key_values=own)
    assert_same(out, want)
    assert out.cache is own


def test_a_text_turn_may_leave_the_pictures_out(model, talk):
    follow = go_on(model, talk.inputs, talk.out, TEXT)
    want = ask(model, follow, cache=talk.cache.fork())
    bare = {"input_ids": follow["input_ids"]}
    assert_same(ask(model, bare, cache=talk.cache.fork()), want)
    grid_only = {**bare, "image_grid_thw": follow["image_grid_thw"]}
    assert_same(ask(model, grid_only, cache=talk.cache.fork()), want)
    new = only_new(follow, talk.cache)
    out = ask(model, new, cache=talk.cache.fork())
    assert torch.equal(logits_of(out), logits_of(want))


def test_the_vision_tower_never_sees_an_old_picture(model, talk):
    patches = []
    handle = model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: patches.append(len((args or [kwargs["hidden_states"]])[0])),
        with_kwargs=True,
    )
    try:
        ask(model, talk.follow, cache=talk.cache)
    finally:
        handle.remove()
    assert patches == [24]


def test_only_new_rows_are_prefilled(model, talk):
    talk.cache.finish()
    with counted_passes(model) as rows:
        out = ask(model, talk.follow, cache=talk.cache)
    new = talk.follow["input_ids"].shape[1] - talk.inputs["input_ids"].shape[1] - 3
    assert rows[0] == new - out.raincheck.n_deferred


def test_tensor_returns_with_a_cache_that_is_kept(model, talk):
    cache = RaincheckCache(model)
    first = ask(model, talk.inputs, cache=cache, return_dict_in_generate=False)
    assert isinstance(first, torch.Tensor)
    assert cache.pending == talk.cache.pending > 0
    assert model.raincheck_report is cache.report
    second = ask(model, talk.follow, cache=cache, return_dict_in_generate=False)
    assert torch.equal(second, ask(model, talk.follow, cache=talk.cache).sequences)
    assert not cache.closed


def test_an_empty_dynamic_cache_is_a_start(model, talk):
    out = ask(model, talk.inputs, cache=DynamicCache(config=model.config.get_text_config()))
    assert_same(out, talk.out)
    assert isinstance(out.cache, RaincheckCache)


# Against stock: with full retention a conversation is stock's


@pytest.mark.parametrize(
    "layouts",
    [
        ("text only", IMAGE, TEXT),
        ("one image", TEXT, IMAGE),
        ("one image", VIDEO, IMAGE),
        ("one video", IMAGE, VIDEO),
        ("image, video, image", "video, image, video", "two images"),
        ("video, image, video", TEXT, "image, video, image"),
    ],
)
def test_full_retention_is_stock_in_every_turn(model, layouts):
    inputs = random_inputs(model, 1, layouts[0])
    cache = RaincheckCache(model)
    full = {"retention": 1, "completion": "lazy"}
    for seed, layout in enumerate([*layouts[1:], None], start=2):
        out, want = ask(model, inputs, full, cache=cache), stock(model, inputs)
        assert torch.equal(out.sequences, want.sequences)
        assert_close(logits_of(out), logits_of(want))
        if layout is not None:
            inputs = go_on(model, inputs, out, layout, seed)


@pytest.mark.parametrize("scope", ["prompt", "item", "frame"])
def test_each_turn_selects_from_its_own_pictures(model, scope):
    inputs = random_inputs(model, 1, "image, video, image")
    cache = RaincheckCache(model)
    for layout, visual in (("video, image, video", 24), (TEXT, 20), (None, 0)):
        out = ask(model, inputs, {**LAZY, "retention_scope": scope}, cache=cache)
        report = out.raincheck
        assert report.n_visual == visual
        assert report.n_selected + report.n_deferred == visual
        assert report.restored_in_answer + report.pending == report.n_deferred
        if layout is not None:
            inputs = go_on(model, inputs, out, layout)
            visual = 0


# Completion


@pytest.mark.parametrize("size", [1, 3, 256])
def test_blocking_and_lazy_completion_agree(model, size):
    inputs = random_inputs(model, 1, "two images")
    second = []
    for completion in ("blocking", "lazy", "background"):
        config = {**LAZY, "completion": completion, "completion_chunk_size": size}
        out = ask(model, inputs, config)
        if completion == "blocking":
            assert out.cache.pending == out.raincheck.pending == 0
            assert out.raincheck.completion_ms > 0
        if completion == "lazy":
            assert out.cache.pending > 0
            assert out.raincheck.completion_ms is None
        second.append(ask(model, go_on(model, inputs, out, VIDEO), config, cache=out.cache))
    for other in second[1:]:
        assert torch.equal(other.sequences, second[0].sequences)
        assert_close(logits_of(other), logits_of(second[0]), atol=1e-5)


def test_completion_does_not_depend_on_its_chunks(model):
    inputs = random_inputs(model, 1, "two images")
    logits = []
    for size in (1, 4, 256):
        out = ask(model, inputs, {**LAZY, "completion_chunk_size": size})
        out.cache.finish()
        logits.append(logits_of(ask(model, go_on(model, inputs, out), cache=out.cache)))
    assert_close(logits[1], logits[0])
    assert_close(logits[2], logits[0])


def test_finish_before_the_next_turn_changes_nothing(model, talk):
    twin = talk.cache.fork()
    twin.finish()
    assert_same(ask(model, talk.follow, cache=twin), ask(model, talk.follow, cache=talk.cache))


# Rule 14


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("waits", [True, False])
def test_parting_inside_the_answer_rolls_back(model, at, waits):
    """As if nothing of the answer had been consumed."""
    inputs = random_inputs(model, 1, "one image")
    long = ask(model, inputs, max_new_tokens=6)
    short = ask(model, inputs, max_new_tokens=1)
    assert len(short.cache.token_ids) == inputs["input_ids"].shape[1]
    if not waits:
        long.cache.finish()

    answer = answer_of(inputs, long)
    answer[at] = (answer[at] + 1) % 100
    other = next_turn(inputs, answer, random_inputs(model, 9, IMAGE))
    out = ask(model, other, cache=long.cache)
    want = ask(model, other, cache=short.cache)
    assert torch.equal(out.sequences, want.sequences)
    assert_close(logits_of(out), logits_of(want))
    assert torch.equal(out.cache.token_ids, want.cache.token_ids)
    assert out.cache.get_seq_length() == other["input_ids"].shape[1] + 3


def test_an_answer_cut_short_rolls_back(model):
    """Templates that strip thinking leave fewer tokens than the cache holds."""
    inputs = random_inputs(model, 1, "one image")
    long = ask(model, inputs, max_new_tokens=12)
    short = ask(model, inputs, max_new_tokens=1)
    other = next_turn(inputs, [], random_inputs(model, 9, [("text", 2)]))
    assert other["input_ids"].shape[1] < long.cache.get_seq_length()
    out, want = ask(model, other, cache=long.cache), ask(model, other, cache=short.cache)
    assert torch.equal(out.sequences, want.sequences)
    assert_close(logits_of(out), logits_of(want))


def test_a_rolled_back_conversation_goes_on(model):
    inputs = random_inputs(model, 1, "one image")
    first = ask(model, inputs, {"retention": 1}, max_new_tokens=6)
    answer = answer_of(inputs, first)
    answer[1] = (answer[1] + 1) % 100
    inputs = next_turn(inputs, answer, random_inputs(model, 9, IMAGE))
    second = ask(model, inputs, {"retention": 1}, cache=first.cache)
    assert_close(logits_of(second), logits_of(stock(model, inputs)))
    inputs = go_on(model, inputs, second, VIDEO)
    third = ask(model, inputs, {"retention": 1}, cache=second.cache)
    assert_close(logits_of(third), logits_of(stock(model, inputs)))


# Copies


@pytest.mark.parametrize("twin_of", [RaincheckCache.fork, copy.deepcopy, copy.copy])
def test_copies_are_independent(model, talk, twin_of):
    twin = twin_of(talk.cache)
    assert twin is not talk.cache
    assert twin.model is model
    want = ask(model, talk.follow, cache=talk.cache.fork())
    other = go_on(model, talk.inputs, talk.out, VIDEO, seed=11)
    elsewhere = ask(model, other, cache=twin)
    assert talk.cache.get_seq_length() == talk.inputs["input_ids"].shape[1] + 3
    assert_same(ask(model, talk.follow, cache=talk.cache), want)
    assert torch.equal(twin.token_ids, elsewhere.sequences[0, :-1])
    talk.cache.close()
    ask(model, go_on(model, other, elsewhere), cache=twin)


@pytest.mark.parametrize("act", [RaincheckCache.finish, RaincheckCache.close])
def test_a_copys_report_is_its_own(talk, act):
    twin = talk.cache.fork()
    pending, report = talk.cache.pending, talk.out.raincheck
    act(twin)
    assert talk.cache.pending == report.pending == pending
    assert report.completion_ms is None
    talk.cache.finish()
    assert report.pending == 0
    assert report.completion_ms is not None


def test_two_conversations_interleaved_are_two_conversations(model):
    layouts = ["one image", "video, image, video"]
    alone = []
    for seed, layout in enumerate(layouts):
        inputs = random_inputs(model, seed, layout)
        first = ask(model, inputs)
        alone.append([first, ask(model, go_on(model, inputs, first, IMAGE), cache=first.cache)])
    starts = [random_inputs(model, seed, layout) for seed, layout in enumerate(layouts)]
    firsts = [ask(model, inputs) for inputs in starts]
    for which in (1, 0):
        first = firsts[which]
        second = ask(model, go_on(model, starts[which], first, IMAGE), cache=first.cache)
        assert_same(first, alone[which][0])
        assert_same(second, alone[which][1])


def test_pickling_is_refused_by_name(talk):
    for thing in (talk.cache, talk.out):
        with pytest.raises(TypeError, match="RaincheckCache cannot be pickled"):
            pickle.dumps(thing)


# Memory


def tensors_of(cache: RaincheckCache) -> list[weakref.ref]:
    """Keys, values, recurrent states and deferred rows."""
    now = cache.conversation
    found = [tensor for buffer in cache.buffers.values() for tensor in vars(buffer).values()]
    for state in now.recurrent.values():
        found += [state.live.state, state.live.history, state.prefix.state]
    found += [rows.embeds for rows in now.deferred._blocks]
    return [weakref.ref(tensor) for tensor in found]


def alive(references: list[weakref.ref], collect: bool = True) -> int:
    if collect:
        gc.collect()
    return sum(reference() is not None for reference in references)


def test_a_dropped_conversation_leaves_nothing(model):
    inputs = random_inputs(model, 1, "two images")
    out = ask(model, inputs)
    out = ask(model, go_on(model, inputs, out, IMAGE), cache=out.cache)
    references = [*tensors_of(out.cache), weakref.ref(out.cache)]
    assert alive(references) >= 5
    del out
    assert alive(references) == 0


def test_a_closed_conversation_leaves_nothing(talk):
    references = tensors_of(talk.cache)
    talk.cache.close()
    assert alive(references) == 0
    assert talk.cache.closed
    assert talk.cache.pending == talk.cache.get_seq_length() == 0
    assert "closed" in repr(talk.cache)


def test_a_fork_does_not_keep_the_original(talk):
    references = [
        weakref.ref(tensor)
        for buffer in talk.cache.buffers.values() for tensor in vars(buffer).values()
    ]  # fmt: skip
    twin = talk.cache.fork()
    talk.cache.close()
    assert alive(references) == 0
    twin.finish()


def test_without_a_cache_all_is_freed_when_generate_returns(model):
    def caches() -> list[Any]:
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) is RaincheckCache]

    before = caches()
    inputs = random_inputs(model, 1, "one image")
    for completion in ("blocking", "lazy", "background"):
        out = ask(model, inputs, {**LAZY, "completion": completion}, return_dict_in_generate=False)
        assert isinstance(out, torch.Tensor)
        assert model.raincheck_report.completion_ms is None
    assert len(caches()) <= len(before)


def test_a_failed_call_leaves_nothing(model):
    seen: list[weakref.ref] = []

    def processor(ids: Any, scores: Any) -> Any:
        seen.extend(tensors_of(cache))
        raise KeyError("mine")

    cache = RaincheckCache(model)
    with pytest.raises(KeyError):
        ask(model, random_inputs(model, 1, "one image"), cache=cache, logits_processor=[processor])
    cache.close()
    assert alive(seen) == 0


def test_embeddings_are_freed_as_they_are_restored(model):
    inputs = random_inputs(model, 1, [("text", 3), ("image", 12, 16), ("text", 4)])
    blocks: list[weakref.ref] = []
    merged: list[weakref.ref] = []
    counts = []

    def processor(ids: Any, scores: Any) -> Any:
        if not blocks:
            blocks.extend(weakref.ref(rows.embeds) for rows in cache.conversation.deferred._blocks)
        counts.append((alive(blocks, collect=False), alive(merged, collect=False)))
        return scores

    handle = model.model.visual.merger.register_forward_hook(
        lambda module, args, output: merged.append(weakref.ref(output))
    )
    cache = RaincheckCache(model)
    config = {**LAZY, "retention": 0.1, "chunk_size": 64, "guard_tokens": 1}
    try:
        out = ask(
            model, inputs, config, cache=cache, max_new_tokens=6, logits_processor=[processor]
        )
    finally:
        handle.remove()
    assert out.raincheck.restored_per_step == [0, 64, 64, 44, 0]
    assert [left for left, _ in counts] == [3, 3, 2, 1, 0, 0]
    assert [left for _, left in counts] == [0] * 6


# Odd users


@pytest.mark.parametrize("then", ["finish", "turn", "fork"])
def test_a_turn_under_inference_mode_and_one_outside(model, talk, then):
    want = ask(model, talk.follow, cache=talk.cache)
    with torch.inference_mode():
        out = ask(model, talk.inputs)
        cache = out.cache.fork() if then == "fork" else out.cache
    if then == "finish":
        cache.finish()
    assert_same(ask(model, talk.follow, cache=cache), want)


def test_inputs_are_left_alone(model, talk):
    before = {name: tensor.clone() for name, tensor in talk.follow.items()}
    ask(model, talk.follow, cache=talk.cache)
    assert all(torch.equal(before[name], tensor) for name, tensor in talk.follow.items())


def test_the_caller_may_overwrite_his_inputs(model, talk):
    """The cache keeps ids of its own."""
    inputs = {name: tensor.clone() for name, tensor in talk.inputs.items()}
    out = ask(model, inputs)
    for tensor in inputs.values():
        tensor.zero_()
    assert_same(ask(model, talk.follow, cache=out.cache), ask(model, talk.follow, cache=talk.cache))


def test_other_settings_in_every_turn(model):
    inputs = random_inputs(model, 1, "image, video, image")
    cache = RaincheckCache(model)
    for config in (
        {**LAZY, "order": "relevance", "selector": "mmtok"},
        {**LAZY, "fuse": False, "guard_tokens": 0, "chunk_size": 511},
        {**LAZY, "defer": "post_answer"},
        {**LAZY, "defer": "never"},
        {"retention": 1},
    ):
        out = ask(model, inputs, config, cache=cache)
        assert out.raincheck.n_visual > 0
        inputs = go_on(model, inputs, out, VIDEO)
    assert torch.isfinite(logits_of(out)).all()


def test_an_image_may_end_the_input(model):
    """Rule 3: the last token is in P whatever it is."""
    inputs = random_inputs(model, 3, [("text", 3), ("image", 3, 3)])
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, :-1]
    last = inputs["input_ids"].shape[1] - 1
    config = {**LAZY, "selector": lambda context: -torch.arange(context.n).float()}
    out = ask(model, inputs, config)
    assert last in out.raincheck.selected.tolist()
    assert last not in out.raincheck.deferred.tolist()
    ask(model, go_on(model, inputs, out), cache=out.cache)


@pytest.mark.parametrize("size", [(3, 3), (2, 4), (4, 2)])
def test_full_retention_is_stock_behind_an_image(model, size):
    """Stock lets each axis of the generated tokens' positions go on from the last token's."""
    inputs = random_inputs(model, 3, [("text", 3), ("image", *size)])
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, :-1]
    full, want = ask(model, inputs, {"retention": 1}), stock(model, inputs)
    assert_close(full.logits[0], want.logits[0])
    assert_close(full.logits[1], want.logits[1])


def test_a_tiny_retention_keeps_one(model):
    out = ask(model, random_inputs(model, 1, "one image"), {**LAZY, "retention": 1e-9})
    assert out.raincheck.n_selected == 1
