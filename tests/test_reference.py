"""The oracle itself: against stock transformers, against a second oracle, and able to fail."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from reference import (
    ARCHITECTURES,
    LAYOUTS,
    Prompt,
    Reference,
    Turn,
    gdn,
    next_turn,
    one_masked_forward,
    prompt_from_inputs,
    random_inputs,
    random_model,
    random_selection,
    schedule,
    visibility,
)
from transformers import DynamicCache

TOKENS = [7, 101, 33, 64, 2, 90, 18, 55, 41, 3]
"""A forced answer."""

both = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Rows of one are too small to share among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model_of(architecture: str) -> torch.nn.Module:
    return random_model(architecture, seed=5)


def pruned(model, inputs, start: int = 0, seed: int = 0) -> Prompt:
    return random_selection(prompt_from_inputs(model, inputs, start=start), seed)


def run(reference: Reference, prompt: Prompt, tokens: list[int], riding: list[int]) -> torch.Tensor:
    return reference.run(Turn(prompt, tokens, riding))


def assert_close(a, b, atol: float) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=0)


# Against stock transformers


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_selection_is_stock_generate(architecture, layout):
    model = model_of(architecture)
    inputs = random_inputs(model, seed=1, layout=layout)
    stock = model.generate(
        **inputs,
        max_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = Reference(model).generate(prompt_from_inputs(model, inputs), 5)
    assert tokens == stock.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert_close(logits, torch.cat(stock.logits), 1e-4)


@both
def test_fp32_is_close_to_stock_too(architecture):
    model = model_of(architecture)
    inputs = random_inputs(model, seed=2, layout="image, video, image")
    logits = Reference(model, torch.float32).prefill(prompt_from_inputs(model, inputs))
    assert_close(logits, model(**inputs).logits[0, -1], 1e-4)


@both
def test_two_full_turns_are_one_stock_forward(architecture):
    model = model_of(architecture)
    first = random_inputs(model, seed=3, layout="two images")
    whole = next_turn(first, TOKENS[:6], random_inputs(model, seed=4, layout="one video"))
    start = first["input_ids"].shape[1]

    reference = Reference(model)
    # The last generated token belongs to the next turn's input.
    got = run(reference, prompt_from_inputs(model, first), TOKENS[:5], [0] * 5)
    second = reference.prefill(prompt_from_inputs(model, whole, start=start + 5))

    stock = model(**whole).logits[0]
    assert_close(got, stock[start - 1 : start + 5], 1e-4)
    assert_close(second, stock[-1], 1e-4)


@both
def test_complete_with_empty_suffix_is_one_stock_forward_over_p_then_d(architecture):
    model = model_of(architecture)
    prompt = pruned(model, random_inputs(model, seed=6, layout="image, video, image"))
    reference = Reference(model)
    first = reference.prefill(prompt)
    assert_close(reference.decode(TOKENS[0]), stock_decode(model, prompt, [], TOKENS[0]), 1e-4)
    reference.rollback()

    stock = stock_prefill(model, prompt, prompt.initial + prompt.deferred)
    assert_close(first, stock.logits[0, len(prompt.initial) - 1], 1e-4)
    for layer in reference.attention_layers:
        assert_close(reference.keys(layer), stock.cache.layers[layer].keys[0], 1e-4)
        assert_close(reference.values(layer), stock.cache.layers[layer].values[0], 1e-4)
    for layer, state in reference.live.items():
        assert_close(state.recurrent, stock.cache.layers[layer].recurrent_states[0][0], 1e-4)
        assert_close(state.window, stock.cache.layers[layer].conv_states[0][0], 1e-4)
    wanted = stock_decode(model, prompt, prompt.deferred, TOKENS[1])
    assert_close(reference.decode(TOKENS[1]), wanted, 1e-4)


@both
def test_next_turn_after_rollback_is_one_stock_forward_over_p_then_d_then_p(architecture):
    model = model_of(architecture)
    first = random_inputs(model, seed=17, layout="one video")
    whole = next_turn(first, [], random_inputs(model, seed=18, layout="two images"))
    start = first["input_ids"].shape[1]
    prompts = [pruned(model, first), pruned(model, whole, start=start, seed=1)]
    reference = Reference(model)
    run(reference, prompts[0], TOKENS[:4], [0, 3, 0, 2])
    reference.rollback()
    logits = reference.prefill(prompts[1])

    full = prompt_from_inputs(model, whole)
    rows = prompts[0].initial + prompts[0].deferred + [start + i for i in prompts[1].initial]
    stock = stock_prefill(model, full, rows)
    assert_close(logits, stock.logits[0, -1], 1e-4)
    for layer, state in reference.live.items():
        assert_close(state.recurrent, stock.cache.layers[layer].recurrent_states[0][0], 1e-4)


@torch.no_grad()
def stock_prefill(model, prompt, rows, token=None):
    """Stock forward over prompt rows in any order, then maybe a token, with a new cache."""
    cache = DynamicCache(config=model.config.text_config)
    embeds, positions = prompt.embeds[rows], prompt.positions[:, rows]
    visual, features = prompt.visual[rows], None
    if prompt.deepstack is not None:
        seen = [prompt.features(row) for row in rows if prompt.visual[row]]
        features = [torch.stack(layer) for layer in zip(*seen, strict=True)] or None
    if token is not None:
        embeds = torch.cat([embeds, model.get_input_embeddings()(torch.tensor([token]))])
        positions = torch.cat([positions, torch.full((3, 1), prompt.next_position)], 1)
        visual = torch.cat([visual, torch.zeros(1, dtype=torch.bool)])
    extra = {}
    if features is not None:
        extra = {"visual_pos_masks": visual[None], "deepstack_visual_embeds": features}
    out = model.model.language_model(
        inputs_embeds=embeds[None], position_ids=positions[:, None], cache=cache, **extra
    )
    out.logits = model.lm_head(out.last_hidden_state)
    return out


def stock_decode(model, prompt, restored, token):
    """Logits after one generated token on P and the restored rows, in one forward."""
    return stock_prefill(model, prompt, prompt.initial + restored, token=token).logits[0, -1]


# Against the second oracle

SCHEDULES = {
    "plain": [0] * 10,
    "one at a time": [1] * 10,
    "guard, then chunks": schedule(12, 10, chunk=5, guard=3),
    "all at once": [99] + [0] * 9,
    "gaps": [2, 0, 0, 3, 0, 1, 0, 0, 2, 0],
}


@pytest.mark.parametrize("riding", SCHEDULES.values(), ids=SCHEDULES)
def test_decode_is_one_masked_forward(riding):
    model = model_of("qwen3_vl")
    first = random_inputs(model, seed=8, layout="image, video, image")
    whole = next_turn(first, TOKENS, random_inputs(model, seed=9, layout="one image"))
    start = first["input_ids"].shape[1] + len(TOKENS) - 1
    prompts = [pruned(model, first), pruned(model, whole, start=start, seed=1)]
    answers = [TOKENS[:-1], TOKENS[::-1]]
    ridings = [riding[:-1], riding]

    reference, turns = Reference(model), []
    got = []
    for prompt, tokens, counts in zip(prompts, answers, ridings, strict=True):
        counts = actual(prompt, counts)
        turns.append(Turn(prompt, tokens, counts))
        got.append(run(reference, prompt, tokens, counts))
        reference.complete()
    wanted = one_masked_forward(model, turns)
    for logits, masked in zip(got, wanted.logits, strict=True):
        assert_close(logits, masked, 1e-9)
    for layer in reference.attention_layers:
        assert_close(reference.keys(layer), wanted.keys[layer], 1e-9)
        assert_close(reference.values(layer), wanted.values[layer], 1e-9)


def actual(prompt: Prompt, counts: list[int]) -> list[int]:
    """Cut a schedule to the deferred rows there are."""
    left, out = len(prompt.deferred), []
    for count in counts:
        out.append(min(count, left))
        left -= out[-1]
    return out


def test_visibility_spelled_out():
    # Two rows of P (first and last), three of D, of which two ride with y_2, four of Y; then a
    # turn of one row and one token.
    selected = torch.tensor([True, False, False, False, True])
    positions = torch.arange(5).expand(3, 5)
    first = Prompt(torch.zeros(5, 1), positions, ~selected, None, selected)
    one = torch.ones(1, dtype=torch.bool)
    second = Prompt(torch.zeros(1, 1), positions[:, :1], ~one, None, one)
    table = visibility([Turn(first, [1, 2, 3, 4], [0, 2, 0, 0]), Turn(second, [5], [0])])
    wanted = """
        1.|...|....|.|.
        11|...|....|.|.
        11|1..|....|.|.
        11|11.|....|.|.
        11|111|....|.|.
        11|...|1...|.|.
        11|...|11..|.|.
        11|11.|111.|.|.
        11|11.|1111|.|.
        11|111|1111|1|.
        11|111|1111|1|1
    """
    rows = [row.replace("|", "") for row in wanted.split()]
    assert [["1" if cell else "." for cell in row] for row in table.tolist()] == [
        list(row) for row in rows
    ]


def test_schedule():
    assert schedule(7, 6, chunk=3, guard=2) == [0, 0, 3, 3, 1, 0]
    assert schedule(7, 2, chunk=31, guard=2) == [0, 0]


# Consistent with itself


@both
def test_what_is_restored_does_not_depend_on_the_schedule(architecture):
    model = model_of(architecture)
    prompt = pruned(model, random_inputs(model, seed=10))
    references = []
    for riding in (SCHEDULES[name][:6] for name in ("plain", "one at a time", "gaps")):
        reference = Reference(model)
        run(reference, prompt, TOKENS[:6], riding)
        reference.complete()
        references.append(reference)
    count = len(prompt.initial) + len(prompt.deferred)
    for other in references[1:]:
        for layer in other.attention_layers:
            assert_close(other.keys(layer)[:, :count], references[0].keys(layer)[:, :count], 1e-12)
            assert_close(
                other.values(layer)[:, :count], references[0].values(layer)[:, :count], 1e-12
            )
        for layer, state in other.checkpoint.items():
            assert_close(state.recurrent, references[0].checkpoint[layer].recurrent, 1e-12)
            assert_close(state.window, references[0].checkpoint[layer].window, 1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_moved_checkpoint_shows_in_the_live_state(length):
    """In the recurrent state always, in the convolution window while the suffix is short."""
    model = model_of("qwen3_5")
    prompt = pruned(model, random_inputs(model, seed=11))
    reference, stale = Reference(model), Reference(model, correct_state=False)
    for each in (reference, stale):
        run(each, prompt, TOKENS[:length], [0] * length)
        each.complete()
    for layer, state in reference.live.items():
        assert float((state.recurrent - stale.live[layer].recurrent).abs().max()) > 1e-2
        changed = (state.window != stale.live[layer].window).any(0).tolist()
        assert changed == [slot < 4 - length for slot in range(4)]


@pytest.mark.parametrize("length", [3, 4, 12])
def test_past_the_convolution_two_replays_differ_by_the_transitions(length):
    """S'_n = S_n + Φ (S'_3 − S_3), with Φ the product of α (I − β k kᵀ) after the third token."""
    model = model_of("qwen3_5")
    prompt = pruned(model, random_inputs(model, seed=11))
    reference = Reference(model)
    text = reference.text
    run(reference, prompt, (TOKENS * 2)[:length], [0] * length)
    before = reference.checkpoint
    reference.complete()
    for layer, moved in reference.checkpoint.items():
        records = [row.records[layer] for row in reference.suffix]
        lead = gdn.replay(text, layer, records[:3], before[layer])
        lead_moved = gdn.replay(text, layer, records[:3], moved)
        expected = gdn.replay(text, layer, records, before[layer]).recurrent
        difference, window = lead_moved.recurrent - lead.recurrent, lead.window
        assert float(difference.abs().max()) > 1e-2
        for token in records[3:]:
            window = gdn.shifted(window, token)
            _, k, _ = gdn.factors(text, layer, window)
            transition = (
                torch.eye(k.shape[1]) - token.beta[:, None, None] * k[:, :, None] * k[:, None]
            )
            difference = token.g.exp()[:, None, None] * transition @ difference
        assert_close(reference.live[layer].recurrent, expected + difference, 1e-12)


@both
def test_rollback_forgets_the_answer(architecture):
    model = model_of(architecture)
    prompt = pruned(model, random_inputs(model, seed=12))
    reference, fresh = Reference(model), Reference(model)
    run(reference, prompt, TOKENS, SCHEDULES["gaps"])
    reference.rollback()
    fresh.prefill(prompt)
    fresh.complete()
    assert_close(reference.decode(TOKENS[3]), fresh.decode(TOKENS[3]), 1e-12)


@both
def test_order_of_restoration(architecture):
    model = model_of(architecture)
    prompt = pruned(model, random_inputs(model, seed=13))
    backwards = replace(prompt, order=prompt.deferred[::-1])
    riding = SCHEDULES["gaps"]
    plain = run(Reference(model), prompt, TOKENS, riding)
    other = run(Reference(model), backwards, TOKENS, riding)
    assert_close(plain[:2], other[:2], 0)
    assert float((plain[2] - other[2]).abs().max()) > 1e-3
    if architecture == "qwen3_vl":
        counts = actual(prompt, riding)
        masked = one_masked_forward(model, [Turn(backwards, TOKENS, counts)])
        assert_close(other, masked.logits[0], 1e-9)


def test_what_is_refused():
    model = model_of("qwen3_vl")
    prompt = pruned(model, random_inputs(model, seed=14))
    reference = Reference(model)
    reference.prefill(prompt)
    with pytest.raises(ValueError, match="complete"):
        reference.prefill(prompt)
    reference.drop_deferred()
    reference.prefill(prompt)
    with pytest.raises(ValueError, match="every text row"):
        replace(prompt, selected=prompt.visual)
    with pytest.raises(ValueError, match="recurrent"):
        one_masked_forward(model_of("qwen3_5"), [Turn(prompt, [], [])])


# Able to fail


@both
def test_everything_matters(architecture):
    """One early visual row, its features, a late restoration: each moves the logits."""
    model = model_of(architecture)
    prompt = prompt_from_inputs(model, random_inputs(model, seed=15))
    row = int(prompt.visual.nonzero()[0])
    logits = run(Reference(model), prompt, TOKENS[:4], [0] * 4)

    embeds = prompt.embeds.clone()
    embeds[row] = embeds[row].flip(0)
    moved = run(Reference(model), replace(prompt, embeds=embeds), TOKENS[:4], [0] * 4)
    assert float((moved - logits).abs().amax(1).min()) > 2e-2

    for layer in range(len(prompt.deepstack or [])):
        features = [each.clone() for each in prompt.deepstack]
        features[layer][0] = features[layer][0].flip(0)
        moved = run(Reference(model), replace(prompt, deepstack=features), TOKENS[:4], [0] * 4)
        assert float((moved - logits).abs().amax(1).min()) > 5e-3


def test_skipping_the_correction_shows():
    model = model_of("qwen3_5")
    prompt = pruned(model, random_inputs(model, seed=16, layout="two images"))
    for riding in ([3] + [0] * 9, [0] * 6 + [99] + [0] * 3):
        right = run(Reference(model), prompt, TOKENS, riding)
        wrong = run(Reference(model, correct_state=False), prompt, TOKENS, riding)
        first = next(step for step, count in enumerate(riding) if count) + 2
        assert_close(right[:first], wrong[:first], 1e-12)
        assert float((right - wrong)[first:].abs().amax(1).min()) > 1e-2
    plain = [0] * 10
    assert_close(
        run(Reference(model), prompt, TOKENS, plain),
        run(Reference(model, correct_state=False), prompt, TOKENS, plain),
        1e-12,
    )
