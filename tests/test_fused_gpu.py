"""The oracles again on a GPU with executor `fused`: fp32 for the bounds, bf16 beside `modules`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from harness import answer_of, distance, enabled_model, follow, logits_of, prompt_of, run_turn
from reference import Reference, next_turn, random_inputs, random_model
from torch import Tensor
from transformers import LogitsProcessor

from raincheck_hf import RaincheckConfig, enable_raincheck

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

MIXED = "image, video, image"
SCHEDULES = [(1, 0), (3, 2), (7, 3), (31, 1), (63, 0), (70, 2)]  # chunk, guard


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32: the bounds are those of fp32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@cache
def on_gpu(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    return enable_raincheck(random_model(architecture, seed=5).to("cuda", dtype))


def drawn(**fields: Any) -> RaincheckConfig:
    defaults = {"selector": "random", "completion": "blocking", "executor": "fused"}
    return RaincheckConfig(**{**defaults, **fields})


def moved(inputs: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
        for name, tensor in inputs.items()
    }


@pytest.mark.parametrize(("chunk", "guard"), SCHEDULES)
@pytest.mark.parametrize("layout", ["one image", MIXED])
def test_o3_every_logit_equals_the_reference(
    architecture: str, layout: str, chunk: int, guard: int
) -> None:
    model, twin = on_gpu(architecture), enabled_model(architecture)
    inputs = random_inputs(twin, 11, layout)
    out = run_turn(model, moved(inputs, model), drawn(chunk_size=chunk, guard_tokens=guard), 22)
    assert out.raincheck.executor == "fused"
    expected = follow(Reference(twin), prompt_of(twin, inputs, out), answer_of(out, inputs), out)
    assert distance(logits_of(out).cpu(), expected) < 1e-4


def test_o4_restored_keys_and_values_do_not_depend_on_the_schedule(architecture: str) -> None:
    model = on_gpu(architecture)
    inputs = moved(random_inputs(enabled_model(architecture), 13, MIXED), model)
    kept = []
    for fields in (
        {"chunk_size": 1},
        {"chunk_size": 7},
        {"chunk_size": 31},
        {"chunk_size": 4, "fuse": False},
        {"defer": "post_answer", "completion_chunk_size": 5},
        {"defer": "post_answer", "completion_chunk_size": 256},
    ):
        out = run_turn(model, inputs, drawn(guard_tokens=1, **fields), 4)
        regions = out.cache.conversation.regions
        assert regions.pending == 0
        kept.append(
            [
                tensor[0, :, regions.initial : regions.answer_start].clone()
                for buffer in out.cache.buffers.values()
                for tensor in (buffer.keys, buffer.values)
            ]
        )
    for other in kept[1:]:
        assert max(map(distance, kept[0], other)) < 1e-5


def test_o4_serial_equals_fused(architecture: str) -> None:
    model = on_gpu(architecture)
    inputs = moved(random_inputs(enabled_model(architecture), 13, MIXED), model)
    fused, serial = (
        run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=1, fuse=fuse), 12)
        for fuse in (True, False)
    )
    assert distance(logits_of(fused), logits_of(serial)) < 1e-5


@pytest.mark.parametrize("layout", ["one image", MIXED])
@pytest.mark.parametrize("guard", [0, 1, 2, 3, 4, 5])
def test_o5_the_live_state_after_a_turn_equals_a_replay(layout: str, guard: int) -> None:
    """The guard decides how many suffix tokens there are when the first chunk comes."""
    model, twin = on_gpu("qwen3_5"), enabled_model("qwen3_5")
    inputs = random_inputs(twin, 11, layout)
    out = run_turn(model, moved(inputs, model), drawn(chunk_size=3, guard_tokens=guard), 9)
    reference = Reference(twin)
    follow(reference, prompt_of(twin, inputs, out), answer_of(out, inputs), out)
    reference.complete()
    for layer, state in out.cache.conversation.recurrent.items():
        for ours, theirs in (
            (state.prefix, reference.checkpoint[layer]),
            (state.live, reference.live[layer]),
        ):
            scale = float(theirs.recurrent.abs().max())
            assert distance(ours.state.cpu(), theirs.recurrent) < 1e-5 * scale
            assert distance(ours.history.cpu(), theirs.window[:, -3:]) < 1e-5


def test_o9_interleaved_conversations_give_what_each_gives_alone(architecture: str) -> None:
    model, twin = on_gpu(architecture), enabled_model(architecture)
    config = drawn(chunk_size=3, guard_tokens=1)
    first = [random_inputs(twin, seed, MIXED) for seed in (21, 22)]
    second = [random_inputs(twin, seed, "one image") for seed in (23, 24)]

    def turn(inputs: Any, cache: Any = None) -> Any:
        return run_turn(model, moved(inputs, model), config, 7, cache=cache)

    def whole(which: int, out: Any) -> Any:
        return next_turn(first[which], answer_of(out, first[which]), second[which])

    alone = []
    for which in (0, 1):
        one = turn(first[which])
        alone.append((logits_of(one), logits_of(turn(whole(which, one), one.cache))))
    a, b = turn(first[0]), turn(first[1])
    b2, a2 = turn(whole(1, b), b.cache), turn(whole(0, a), a.cache)
    for got, expected in zip([(a, a2), (b, b2)], alone, strict=True):
        assert distance(logits_of(got[0]), expected[0]) < 1e-5
        assert distance(logits_of(got[1]), expected[1]) < 1e-5


def test_a_call_gives_the_same_bits_again(architecture: str) -> None:
    """Launched at first, captured later."""
    model = on_gpu(architecture)
    inputs = moved(random_inputs(enabled_model(architecture), 17, MIXED), model)
    first, *later = (
        logits_of(run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=1), 7)) for _ in range(4)
    )
    assert all(torch.equal(first, again) for again in later)


def test_threads_do_not_meet(architecture: str) -> None:
    """They share the captured passes, and the stream that the tower is queued on."""
    model = on_gpu(architecture)
    inputs = [moved(random_inputs(enabled_model(architecture), n, MIXED), model) for n in range(4)]

    def talk(which: int) -> list[Tensor]:
        config = drawn(chunk_size=3, guard_tokens=1, completion="background")
        return [logits_of(run_turn(model, inputs[which], config, 7)) for _ in range(5)]

    alone = [talk(which) for which in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(talk, range(4)))
    for one, other in zip(alone, together, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert distance(ours, theirs) < 1e-4


@pytest.mark.parametrize("completion", ["lazy", "background"])
def test_two_turns_equal_the_reference(architecture: str, completion: str) -> None:
    model, twin = on_gpu(architecture), enabled_model(architecture)
    config = drawn(chunk_size=3, guard_tokens=2, completion=completion, completion_chunk_size=2)
    inputs = random_inputs(twin, 31, MIXED)
    one = run_turn(model, moved(inputs, model), config, 5)
    tokens, prompt = answer_of(one, inputs), prompt_of(twin, inputs, one)
    whole = next_turn(inputs, tokens, random_inputs(twin, 32, "one image"))
    start = one.cache.get_seq_length()
    two = run_turn(model, moved(whole, model), config, 6, cache=one.cache)
    reference = Reference(twin)
    follow(reference, prompt, tokens, one)
    reference.complete()
    second = prompt_of(twin, whole, two, start=start)
    expected = follow(reference, second, answer_of(two, whole), two)
    assert distance(logits_of(two).cpu(), expected) < 1e-4


def test_weights_edited_in_place_count(architecture: str) -> None:
    model = enable_raincheck(random_model(architecture, seed=6).cuda())
    inputs = moved(random_inputs(enabled_model(architecture), 11, "one image"), model)
    before = logits_of(run_turn(model, inputs, drawn(), 3))
    with torch.no_grad():
        model.model.language_model.layers[0].mlp.up_proj.weight.mul_(1.5)
    ours, theirs = (
        logits_of(run_turn(model, inputs, drawn(executor=executor), 3))
        for executor in ("fused", "modules")
    )
    assert distance(ours, theirs) < 1e-4 < distance(before, ours)


class Forced(LogitsProcessor):
    """Makes an answer the same in every precision; raw logits stay what they are."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, next(self._tokens)] = 0.0
        return forced


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_low_precision_fused_is_as_near_to_fp32_as_modules(
    architecture: str, dtype: torch.dtype
) -> None:
    inputs = random_inputs(enabled_model(architecture), 11, MIXED)
    tokens = [5, 17, 3, 29, 11, 40, 8, 23, 2, 31, 6, 19]

    def logits(model: Any, executor: str) -> Tensor:
        out = model.generate(
            **moved(inputs, model),
            raincheck=drawn(chunk_size=3, guard_tokens=2, executor=executor),
            max_new_tokens=len(tokens), do_sample=False, output_logits=True,
            return_dict_in_generate=True, logits_processor=[Forced(tokens)],
        )  # fmt: skip
        assert out.raincheck.executor == executor
        return logits_of(out).double()

    exact = logits(on_gpu(architecture), "modules")
    low = on_gpu(architecture, dtype)
    ours, theirs = (
        float((logits(low, name) - exact).square().mean().sqrt()) for name in ("fused", "modules")
    )
    assert ours <= 2 * theirs, (ours, theirs)
