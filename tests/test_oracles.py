"""The oracles: what Raincheck computes, against stock transformers and an independent reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import (
    answer_of,
    distance,
    enabled_model,
    follow,
    logits_of,
    prompt_of,
    run_turn,
)
from reference import (
    LAYOUTS,
    Prompt,
    Reference,
    Turn,
    next_turn,
    one_masked_forward,
    random_inputs,
    random_model,
)
from transformers import DynamicCache

from raincheck_hf import RaincheckCache, RaincheckConfig, recurrent
from raincheck_hf.kernels import suffix_map
from raincheck_hf.turn import Turn as Turn_

MIXED = "image, video, image"
SCHEDULES = [(1, 0), (3, 2), (4, 0), (7, 3), (31, 1), (31, 16)]  # chunk, guard


def drawn(**fields: Any) -> RaincheckConfig:
    return RaincheckConfig(selector="random", completion="blocking", **fields)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_o1_retention_one_is_stock(architecture: str, layout: str) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 3, layout)
    options = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    stock = model.generate(**inputs, do_sample=False, **options)
    ours = run_turn(model, inputs, RaincheckConfig(retention=1.0), 12)
    assert torch.equal(stock.sequences, ours.sequences)
    assert distance(logits_of(ours), logits_of(stock)) < 1e-4
    assert ours.raincheck.n_deferred == 0


def test_o2_without_raincheck_is_stock_bit_for_bit(architecture: str) -> None:
    inputs = random_inputs(enabled_model(architecture), 3, MIXED)
    options = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    stock = random_model(architecture, seed=5).generate(**inputs, do_sample=False, **options)
    for choice in (False, None):
        ours = enabled_model(architecture).generate(
            **inputs, raincheck=choice, do_sample=False, **options
        )
        assert torch.equal(logits_of(stock), logits_of(ours))
        assert torch.equal(stock.sequences, ours.sequences)


@pytest.mark.parametrize(("chunk", "guard"), SCHEDULES)
@pytest.mark.parametrize("layout", ["one image", MIXED])
def test_o3_every_logit_equals_the_reference(
    architecture: str, layout: str, chunk: int, guard: int
) -> None:
    """Both architectures against the row-by-row simulation: attention and the state's join."""
    model = enabled_model(architecture)
    inputs = random_inputs(model, 11, layout)
    config = drawn(retention=0.3, chunk_size=chunk, guard_tokens=guard)
    out = run_turn(model, inputs, config, 22)
    prompt = prompt_of(model, inputs, out)
    expected = follow(Reference(model), prompt, answer_of(out, inputs), out)
    assert distance(logits_of(out), expected) < 1e-4
    assert sum(out.raincheck.restored_per_step) == (
        min(len(prompt.deferred), max(0, 21 - guard) * chunk)
    )


@pytest.mark.parametrize(("chunk", "guard"), SCHEDULES)
def test_o3_full_attention_equals_one_masked_forward(chunk: int, guard: int) -> None:
    model = enabled_model("qwen3_vl")
    inputs = random_inputs(model, 12, MIXED)
    out = run_turn(model, inputs, drawn(chunk_size=chunk, guard_tokens=guard), 22)
    tokens = answer_of(out, inputs)
    turn = Turn(prompt_of(model, inputs, out), tokens[:-1], out.raincheck.restored_per_step)
    expected = one_masked_forward(model, [turn])
    assert distance(logits_of(out), expected.logits[0]) < 1e-4
    for layer, buffer in out.cache.buffers.items():
        stop = out.cache.conversation.regions.end
        assert distance(buffer.keys[0, :, :stop], expected.keys[layer]) < 1e-4
        assert distance(buffer.values[0, :, :stop], expected.values[layer]) < 1e-4


def test_o3_visible_rows_matter(architecture: str) -> None:
    """The bound means something: the same answer under another schedule is far away."""
    model = enabled_model(architecture)
    inputs = random_inputs(model, 11, MIXED)
    out = run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=2), 12)
    prompt, tokens = prompt_of(model, inputs, out), answer_of(out, inputs)
    late = Reference(model)
    logits = [late.prefill(prompt)]
    for token, chunk in zip(tokens[:-1], [0, *out.raincheck.restored_per_step[:-1]], strict=True):
        logits.append(late.decode(token, chunk))
    assert distance(logits_of(out), torch.stack(logits)) > 1e-2


@pytest.mark.parametrize("order", ["source", "relevance"])
def test_o4_restored_keys_and_values_do_not_depend_on_the_schedule(
    architecture: str, order: str
) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 13, MIXED)
    kept = []
    for fields in (
        {"chunk_size": 1},
        {"chunk_size": 7},
        {"chunk_size": 31},
        {"chunk_size": 4, "fuse": False},
        {"defer": "post_answer", "completion_chunk_size": 5},
        {"defer": "post_answer", "completion_chunk_size": 256},
    ):
        out = run_turn(model, inputs, drawn(guard_tokens=1, order=order, **fields), 4)
        regions = out.cache.conversation.regions
        assert regions.pending == 0
        kept.append(
            [
                tensor[0, :, regions.initial : regions.answer_start]
                for buffer in out.cache.buffers.values()
                for tensor in (buffer.keys, buffer.values)
            ]
        )
    for other in kept[1:]:
        assert max(map(distance, kept[0], other)) < 1e-5


def test_o4_serial_equals_fused(architecture: str) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 13, MIXED)
    fused, serial = (
        run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=1, fuse=fuse), 12)
        for fuse in (True, False)
    )
    assert fused.raincheck.restored_per_step == serial.raincheck.restored_per_step
    assert distance(logits_of(fused), logits_of(serial)) < 1e-5


def suffix(length: int, seed: int = 0) -> dict[str, Any]:
    """A recurrent layer of random factors: convolution, two checkpoints, a suffix."""
    draw = torch.Generator().manual_seed(seed)
    conv = suffix_map.Convolution(
        weight=torch.randn(2 * 2 * 16 + 4 * 8, 4, generator=draw) * 0.5,
        bias=None,
        key_heads=2,
        key_dim=16,
        value_heads=4,
        value_dim=8,
    )

    def checkpoint() -> recurrent.Checkpoint:
        state = torch.randn(4, 16, 8, generator=draw)
        return recurrent.Checkpoint(state, torch.randn(len(conv.weight), 3, generator=draw))

    return {
        "conv": conv,
        "before": checkpoint(),
        "after": checkpoint(),
        "factors": recurrent.Factors(
            inputs=torch.randn(len(conv.weight), length, generator=draw),
            g=-0.05 * torch.rand(length, 4, generator=draw),
            beta=torch.rand(length, 4, generator=draw),
        ),
    }


def brute_force(case: dict[str, Any], start: recurrent.Checkpoint) -> torch.Tensor:
    """Token by token in float64, with loops: convolve, normalise, apply the delta rule."""
    conv, factors = case["conv"], case["factors"]
    stream = torch.cat([start.history, factors.inputs], dim=1).double()
    weight, state = conv.weight.double(), start.state.double().clone()
    for t in range(len(factors)):
        window = stream[:, t : t + 4]
        mixed = torch.nn.functional.silu((window * weight).sum(1))
        keys, values = mixed[32:64].reshape(2, 16), mixed[64:].reshape(4, 8)
        for head in range(4):
            k = keys[head // 2]
            k = k / (k.square().sum() + 1e-6).sqrt()
            alpha, beta = factors.g[t, head].double().exp(), factors.beta[t, head].double()
            decayed = alpha * state[head]
            read = k @ decayed
            state[head] = decayed + beta * torch.outer(k, values[head] - read)
    return state


def recorded(case: dict[str, Any]) -> recurrent.RecurrentState:
    """The suffix consumed from the first checkpoint, as decode passes do it."""
    state = recurrent.RecurrentState.at(case["before"])
    factors = case["factors"]
    for t in range(len(factors)):
        token = recurrent.Factors(
            factors.inputs[:, t : t + 1], factors.g[t : t + 1], factors.beta[t : t + 1]
        )
        live = suffix_map.replay(
            case["conv"], state.live.state, state.live.history, token.inputs, token.g, token.beta
        )
        state = state.recorded(case["conv"], live, token)
    return state


LENGTHS = [1, 2, 3, 4, 5, 40]


@pytest.mark.parametrize("length", LENGTHS)
def test_o5_join_and_boundary_repair_equal_a_replay(length: int) -> None:
    case = suffix(length, seed=length)
    moved = recorded(case).moved(case["conv"], case["after"])
    expected = brute_force(case, case["after"])
    assert distance(moved.live.state, expected) < 1e-5 * float(expected.abs().max())
    # Φ is not reset by a join: a second move from the same suffix is right too.
    again = suffix(length, seed=100)["after"]
    expected = brute_force(case, again)
    twice = moved.moved(case["conv"], again)
    assert distance(twice.live.state, expected) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("length", LENGTHS)
def test_o5_the_convolution_window_moves_with_a_short_suffix(length: int) -> None:
    case = suffix(length, seed=length)
    moved = recorded(case).moved(case["conv"], case["after"])
    stream = torch.cat([case["after"].history, case["factors"].inputs], dim=1)
    assert torch.equal(moved.live.history, stream[:, -3:])


def test_o5_fails_when_the_join_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    case = suffix(40)
    monkeypatch.setattr(suffix_map, "join", lambda live, phi, moved, before: live)
    moved = recorded(case).moved(case["conv"], case["after"])
    expected = brute_force(case, case["after"])
    assert distance(moved.live.state, expected) > 1e-2 * float(expected.abs().max())


def test_o5_fails_when_the_boundary_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    case = suffix(5)
    state = recorded(case)
    stale = recurrent.Checkpoint(case["after"].state, case["before"].history)
    moved = state.moved(case["conv"], stale)
    expected = brute_force(case, case["after"])
    assert distance(moved.live.state, expected) > 1e-2 * float(expected.abs().max())


def test_join_matters_in_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the join off, O3 fails on the random model: its layers remember long enough."""
    model = enabled_model("qwen3_5")
    inputs = random_inputs(model, 11, MIXED)
    monkeypatch.setattr(suffix_map, "join", lambda live, phi, moved, before: live)
    out = run_turn(model, inputs, drawn(chunk_size=4, guard_tokens=8), 22)
    expected = follow(Reference(model), prompt_of(model, inputs, out), answer_of(out, inputs), out)
    assert distance(logits_of(out), expected) > 1e-3


@pytest.mark.parametrize("layout", ["one image", MIXED])
def test_o5_the_live_state_after_a_turn_equals_the_reference(layout: str) -> None:
    """The reference replays every suffix token one by one from the moved checkpoint."""
    model = enabled_model("qwen3_5")
    inputs = random_inputs(model, 11, layout)
    out = run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=5), 9)
    reference = Reference(model)
    follow(reference, prompt_of(model, inputs, out), answer_of(out, inputs), out)
    reference.complete()
    for layer, state in out.cache.conversation.recurrent.items():
        for ours, theirs in (
            (state.prefix, reference.checkpoint[layer]),
            (state.live, reference.live[layer]),
        ):
            scale = float(theirs.recurrent.abs().max())
            assert distance(ours.state, theirs.recurrent) < 1e-5 * scale
            assert distance(ours.history, theirs.window[:, -3:]) < 1e-5


def test_o6_restored_with_an_empty_suffix_equals_one_forward_over_p_then_d(
    architecture: str,
) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 14, MIXED)
    config = drawn(defer="post_answer", completion_chunk_size=4)
    out = run_turn(model, inputs, config, 1)  # one token: nothing of Y is consumed
    prompt = prompt_of(model, inputs, out)
    stock, forced_logits = stock_over_p_then_d(model, prompt, out.cache.last_token)

    cache, stop = out.cache, out.cache.conversation.regions.end
    for layer, buffer in cache.buffers.items():
        assert distance(buffer.keys[0, :, :stop], stock.layers[layer].keys[0, :, :stop]) < 1e-4
        assert distance(buffer.values[0, :, :stop], stock.layers[layer].values[0, :, :stop]) < 1e-4
    reference = Reference(model)
    reference.prefill(prompt)
    reference.complete()
    for layer, state in cache.conversation.recurrent.items():
        assert distance(state.live.state, reference.live[layer].recurrent) < 1e-4
        assert torch.equal(state.live.history, state.prefix.history)

    forced = torch.tensor([[cache.last_token]])
    follow_up = {"input_ids": torch.cat([inputs["input_ids"], forced], dim=1)}
    again = run_turn(model, follow_up, drawn(), 1, cache=cache)
    assert distance(logits_of(again)[0], forced_logits) < 1e-4
    for layer, state in cache.conversation.recurrent.items():
        stock_layer = stock.layers[layer]
        assert distance(state.live.state, stock_layer.recurrent_states[0][0]) < 1e-4
        assert distance(state.live.history, stock_layer.conv_states[0][0, :, -3:]) < 1e-4


@torch.no_grad()
def stock_over_p_then_d(
    model: Any, prompt: Prompt, forced: int
) -> tuple[DynamicCache, torch.Tensor]:
    """Stock layers: one forward over P then D with original positions, then a forced token."""
    order = torch.tensor(prompt.initial + prompt.deferred)
    text, cache = model.model.language_model, DynamicCache(config=model.config.get_text_config())
    extra = {}
    if prompt.deepstack:
        rank = (prompt.visual.cumsum(0) - 1)[order][prompt.visual[order]]
        extra = {
            "visual_pos_masks": prompt.visual[order][None],
            "deepstack_visual_embeds": [layer[rank] for layer in prompt.deepstack],
        }
    text(
        inputs_embeds=prompt.embeds[order][None],
        position_ids=prompt.positions[:, None, order],
        cache=cache,
        use_cache=True,
        **extra,
    )
    hidden = text(
        inputs_embeds=model.get_input_embeddings()(torch.tensor([[forced]])),
        position_ids=torch.full((3, 1, 1), prompt.next_position),
        cache=cache,
        use_cache=True,
    ).last_hidden_state
    return cache, model.lm_head(hidden)[0, -1]


def test_o7_deferred_embeddings_never_reach_hard_and_reach_the_second_turn(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing pixels would be no test: vision attention mixes patches."""
    model = enabled_model(architecture)
    inputs = random_inputs(model, 15, MIXED)

    def two_turns(defer: str, disturb: bool) -> list[torch.Tensor]:
        if disturb:
            monkeypatch.setattr(Turn_, "_choose", disturbed)
        first = run_turn(model, inputs, drawn(defer=defer, guard_tokens=99), 5)
        monkeypatch.undo()
        answer = answer_of(first, inputs)
        whole = next_turn(inputs, answer, random_inputs(model, 16, "text only"))
        second = run_turn(model, whole, drawn(defer=defer), 5, cache=first.cache)
        return [logits_of(first), logits_of(second)]

    plain = Turn_._choose

    def disturbed(self: Any, *args: Any) -> Any:
        rows, kept, *others = plain(self, *args)
        dropped = ~kept
        embeds = rows.embeds + dropped[:, None] * torch.randn_like(rows.embeds)
        of_visual = dropped[rows.visual][:, None]
        deepstack = tuple(x + of_visual * torch.randn_like(x) for x in rows.deepstack)
        return replace(rows, embeds=embeds, deepstack=deepstack), kept, *others

    hard, hard_disturbed = two_turns("never", False), two_turns("never", True)
    assert torch.equal(hard[0], hard_disturbed[0])
    assert torch.equal(hard[1], hard_disturbed[1])
    ours, ours_disturbed = two_turns("decode", False), two_turns("decode", True)
    assert distance(ours[0], hard[0]) < 1e-5  # the guard outlasts the answer
    assert torch.equal(ours[0], ours_disturbed[0])
    assert distance(ours[1], ours_disturbed[1]) > 1e-3


def test_o9_interleaved_conversations_give_what_each_gives_alone(architecture: str) -> None:
    model = enabled_model(architecture)
    config = drawn(chunk_size=3, guard_tokens=1)
    first = [random_inputs(model, seed, MIXED) for seed in (21, 22)]
    second = [random_inputs(model, seed, "one image") for seed in (23, 24)]

    def turn(which: int, inputs: Any, cache: RaincheckCache | None = None) -> Any:
        return run_turn(model, inputs, config, 7, cache=cache)

    def whole(which: int, out: Any) -> Any:
        return next_turn(first[which], answer_of(out, first[which]), second[which])

    alone = []
    for which in (0, 1):
        one = turn(which, first[which])
        two = turn(which, whole(which, one), one.cache)
        alone.append((logits_of(one), logits_of(two)))
    a, b = turn(0, first[0]), turn(1, first[1])
    b2, a2 = turn(1, whole(1, b), b.cache), turn(0, whole(0, a), a.cache)
    for got, expected in zip([(a, a2), (b, b2)], alone, strict=True):
        assert torch.equal(logits_of(got[0]), expected[0])
        assert torch.equal(logits_of(got[1]), expected[1])


@pytest.mark.parametrize("completion", ["blocking", "lazy", "background"])
def test_two_turns_equal_the_reference(architecture: str, completion: str) -> None:
    """A second turn with a new image, after completion, positions and all."""
    model = enabled_model(architecture)
    config = RaincheckConfig(selector="random", chunk_size=3, guard_tokens=2, completion=completion)
    inputs = random_inputs(model, 31, MIXED)
    one = run_turn(model, inputs, config, 5)
    tokens = answer_of(one, inputs)
    prompt = prompt_of(model, inputs, one)
    whole = next_turn(inputs, tokens, random_inputs(model, 32, "one image"))
    start = one.cache.get_seq_length()
    assert start == inputs["input_ids"].shape[1] + len(tokens) - 1
    two = run_turn(model, whole, config, 6, cache=one.cache)

    reference = Reference(model)
    follow(reference, prompt, tokens, one)
    reference.complete()
    second = prompt_of(model, whole, two, start=start)
    expected = follow(reference, second, answer_of(two, whole), two)
    assert distance(logits_of(two), expected) < 1e-4


def test_rollback_equals_a_turn_that_never_answered(architecture: str) -> None:
    """Rule 14: ids that part inside the last answer go on from the end of that turn's input."""
    model = enabled_model(architecture)
    config = drawn(chunk_size=3, guard_tokens=1)
    inputs = random_inputs(model, 33, MIXED)
    one = run_turn(model, inputs, config, 8)
    prompt, tokens = prompt_of(model, inputs, one), answer_of(one, inputs)
    rewritten = [tokens[0], tokens[1], (tokens[2] + 1) % 50, 4, 5]
    whole = next_turn(inputs, rewritten, random_inputs(model, 34, "text only"))
    two = run_turn(model, whole, config, 5, cache=one.cache)

    reference = Reference(model)
    reference.prefill(prompt)
    reference.complete()
    second = prompt_of(model, whole, two, start=inputs["input_ids"].shape[1])
    assert distance(logits_of(two), follow(reference, second, answer_of(two, whole), two)) < 1e-4
