"""The rest of the family: the oracles on Qwen3-VL-MoE, Qwen3.5-MoE and Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import answer_of, distance, enabled_model, follow, logits_of, prompt_of, run_turn
from PIL import Image
from reference import (
    LAYOUTS,
    Reference,
    SpiedVision,
    Turn,
    next_turn,
    one_masked_forward,
    random_inputs,
    random_model,
)

# Collected here again, for each `architecture` of this file.
from test_oracles import (  # noqa: F401
    MIXED,
    drawn,
    test_o2_without_raincheck_is_stock_bit_for_bit,
    test_o3_visible_rows_matter,
    test_o4_serial_equals_fused,
    test_o6_restored_with_an_empty_suffix_equals_one_forward_over_p_then_d,
    test_o7_deferred_embeddings_never_reach_hard_and_reach_the_second_turn,
    test_o9_interleaved_conversations_give_what_each_gives_alone,
    test_rollback_equals_a_turn_that_never_answered,
    test_two_turns_equal_the_reference,
)
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from raincheck_hf import (
    RaincheckCache,
    RaincheckConfig,
    RaincheckSession,
    disable_raincheck,
    enable_raincheck,
)
from raincheck_hf.kernels import suffix_map
from raincheck_hf.models import vision
from raincheck_hf.tiny.processing import CHAT_TEMPLATE, build_tokenizer

FAMILY = ("qwen3_vl_moe", "qwen3_5_moe", "qwen2_5_vl")
SCHEDULES = [(1, 0), (3, 2), (31, 1)]  # chunk, guard


@pytest.fixture(params=FAMILY)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def stock(model: Any, inputs: Any, tokens: int) -> Any:
    options = {"max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, do_sample=False, **options)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_o1_retention_one_is_stock_over_two_turns(architecture: str, layout: str) -> None:
    """The second turn goes on from the cache, and is stock over the whole conversation."""
    model = enabled_model(architecture)
    inputs = random_inputs(model, 3, layout)
    full = RaincheckConfig(retention=1.0)
    one, want = run_turn(model, inputs, full, 8), stock(model, inputs, 8)
    assert torch.equal(want.sequences, one.sequences)
    assert distance(logits_of(one), logits_of(want)) < 1e-4

    new = random_inputs(model, 4, "video, image, video")
    whole = next_turn(inputs, answer_of(one, inputs), new)
    two, want = run_turn(model, whole, full, 8, cache=one.cache), stock(model, whole, 8)
    assert torch.equal(want.sequences, two.sequences)
    assert distance(logits_of(two), logits_of(want)) < 1e-4
    assert two.raincheck.n_deferred == 0


@pytest.mark.parametrize(("chunk", "guard"), SCHEDULES)
@pytest.mark.parametrize("layout", ["one video", MIXED])
def test_o3_every_logit_equals_the_reference(
    architecture: str, layout: str, chunk: int, guard: int
) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 11, layout)
    out = run_turn(model, inputs, drawn(chunk_size=chunk, guard_tokens=guard), 14)
    prompt, tokens = prompt_of(model, inputs, out), answer_of(out, inputs)
    assert distance(logits_of(out), follow(Reference(model), prompt, tokens, out)) < 1e-4
    assert sum(out.raincheck.restored_per_step) == (
        min(len(prompt.deferred), max(0, 13 - guard) * chunk)
    )


@pytest.mark.parametrize(("chunk", "guard"), SCHEDULES)
@pytest.mark.parametrize("architecture", ["qwen3_vl_moe", "qwen2_5_vl"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_o3_two_turns_are_one_masked_forward(
    architecture: str, attention: str, chunk: int, guard: int
) -> None:
    model = random_model(architecture, seed=5)
    model.set_attn_implementation(attention)
    enable_raincheck(model)
    config = drawn(chunk_size=chunk, guard_tokens=guard)
    inputs = random_inputs(model, 12, MIXED)
    one = run_turn(model, inputs, config, 9)
    start = one.cache.get_seq_length()
    whole = next_turn(inputs, answer_of(one, inputs), random_inputs(model, 13, "one video"))
    two = run_turn(model, whole, config, 9, cache=one.cache)
    turns = [
        Turn(
            prompt_of(model, said, out, at),
            answer_of(out, said)[:-1],
            out.raincheck.restored_per_step,
        )
        for said, out, at in ((inputs, one, 0), (whole, two, start))
    ]
    expected = one_masked_forward(model, turns)
    assert distance(logits_of(one), expected.logits[0]) < 1e-4
    assert distance(logits_of(two), expected.logits[1]) < 1e-4
    for layer, buffer in two.cache.buffers.items():
        stop = two.cache.conversation.regions.end
        assert distance(buffer.keys[0, :, :stop], expected.keys[layer]) < 1e-4
        assert distance(buffer.values[0, :, :stop], expected.values[layer]) < 1e-4


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 18])
def test_o5_join_and_boundary_repair_equal_a_replay(tokens: int) -> None:
    """The reference replays every suffix token one by one from the moved checkpoint."""
    model = enabled_model("qwen3_5_moe")
    inputs = random_inputs(model, 11, MIXED)
    out = run_turn(model, inputs, drawn(guard_tokens=99), tokens)  # the suffix is one shorter
    reference = Reference(model)
    follow(reference, prompt_of(model, inputs, out), answer_of(out, inputs), out)
    reference.complete()
    assert len(out.cache.conversation.recurrent) == 3
    for layer, state in out.cache.conversation.recurrent.items():
        for ours, theirs in (
            (state.prefix, reference.checkpoint[layer]),
            (state.live, reference.live[layer]),
        ):
            scale = float(theirs.recurrent.abs().max())
            assert distance(ours.state, theirs.recurrent) < 1e-5 * scale
            assert distance(ours.history, theirs.window[:, -3:]) < 1e-5


def test_o5_fails_when_the_join_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled_model("qwen3_5_moe")
    inputs = random_inputs(model, 11, MIXED)
    monkeypatch.setattr(suffix_map, "join", lambda live, phi, moved, before: live)
    out = run_turn(model, inputs, drawn(chunk_size=4, guard_tokens=8), 18)
    expected = follow(Reference(model), prompt_of(model, inputs, out), answer_of(out, inputs), out)
    assert distance(logits_of(out), expected) > 1e-3


def test_the_second_turn_recovers_what_hard_pruning_lost(architecture: str) -> None:
    """Same selection, same answer: hard's second turn lacks D, ours is the reference's with it."""
    model = enabled_model(architecture)
    inputs = random_inputs(model, 21, MIXED)
    new = random_inputs(model, 22, "text only")
    second = {}
    for defer in ("never", "decode"):
        config = drawn(defer=defer, guard_tokens=99)
        one = run_turn(model, inputs, config, 5)
        whole = next_turn(inputs, answer_of(one, inputs), new)
        start = one.cache.get_seq_length()
        two = run_turn(model, whole, config, 6, cache=one.cache)
        reference = Reference(model)
        follow(reference, prompt_of(model, inputs, one), answer_of(one, inputs), one)
        if defer == "never":
            reference.drop_deferred()
        else:
            reference.complete()
        prompt = prompt_of(model, whole, two, start=start)
        expected = follow(reference, prompt, answer_of(two, whole), two)
        assert distance(logits_of(two), expected) < 1e-4
        second[defer] = logits_of(two)
    assert distance(second["never"][0], second["decode"][0]) > 1e-2


def test_disabling_leaves_the_model_as_it_was(architecture: str) -> None:
    model = random_model(architecture, seed=5)
    before = [sorted(module.__dict__) for module in model.modules()]
    enable_raincheck(model)
    run_turn(model, random_inputs(model, 3, "one image"), drawn(), 3)
    disable_raincheck(model)
    assert [sorted(module.__dict__) for module in model.modules()] == before


# Experts


@pytest.mark.parametrize("architecture", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_rows_of_one_pass_go_to_different_experts(architecture: str) -> None:
    """Else the oracles above would say little about routing."""
    model = enabled_model(architecture)
    chosen: list[torch.Tensor] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    handles = [
        gate.register_forward_hook(lambda m, a, out: chosen.append(out[2])) for gate in gates
    ]
    run_turn(model, random_inputs(model, 11, MIXED), drawn(chunk_size=3, guard_tokens=0), 4)
    for handle in handles:
        handle.remove()
    fused = [rows for rows in chosen if len(rows) == 4]  # a chunk of three and a decode row
    assert len(fused) == 3 * len(gates)
    assert any(len(rows.unique()) == 6 for rows in chosen)
    assert all(not torch.equal(rows[0], rows[-1]) for rows in fused[: len(gates)])


@pytest.mark.parametrize("architecture", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_recording_router_logits_changes_nothing(architecture: str) -> None:
    model = enable_raincheck(random_model(architecture, seed=5))
    inputs = random_inputs(model, 11, MIXED)
    plain = run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=1), 6)
    model.config.text_config.output_router_logits = True
    recorded = run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=1), 6)
    assert torch.equal(logits_of(plain), logits_of(recorded))


@pytest.mark.parametrize("architecture", ["qwen3_vl_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_every_way_to_run_experts_works(architecture: str, experts: str) -> None:
    model = random_model(architecture, seed=5)
    model.set_experts_implementation(experts)
    enable_raincheck(model)
    inputs = random_inputs(model, 11, MIXED)
    out = run_turn(model, inputs, drawn(chunk_size=3, guard_tokens=1), 6)
    expected = follow(Reference(model), prompt_of(model, inputs, out), answer_of(out, inputs), out)
    assert distance(logits_of(out), expected) < 1e-4


# Qwen2.5-VL: time in positions, one run of placeholders a video

TWO_VIDEOS = (("video", 3, 2, 2), ("text", 2), ("image", 3, 2), ("video", 2, 2, 3), ("text", 3))


def test_seconds_move_positions_as_in_stock() -> None:
    model, full = enabled_model("qwen2_5_vl"), RaincheckConfig(retention=1.0)
    inputs = random_inputs(model, 3, TWO_VIDEOS)
    seen = []
    for seconds in ([5.0, 0.4], torch.tensor([5.0, 0.4]), torch.tensor([0.3, 2.0]), None):
        given = {**inputs, "second_per_grid_ts": seconds}
        want, got = stock(model, given, 3), run_turn(model, given, full, 3)
        assert distance(logits_of(got), logits_of(want)) < 1e-4
        seen.append(logits_of(got))
    assert torch.equal(seen[0], seen[1])
    assert min(distance(seen[1], seen[2]), distance(seen[1], seen[3])) > 1e-3


def test_a_follow_up_may_leave_out_old_videos_or_bring_them_along() -> None:
    model, config = enabled_model("qwen2_5_vl"), drawn(chunk_size=3, guard_tokens=1)
    inputs, new = random_inputs(model, 3, TWO_VIDEOS), random_inputs(model, 4, "one video")
    answers = []
    for kept in ("all", "new"):
        one = run_turn(model, inputs, config, 4)
        whole = next_turn(inputs, answer_of(one, inputs), new)
        if kept == "new":
            media = {key: value for key, value in new.items() if "pixel" in key or "grid" in key}
            whole = {**media, "input_ids": whole["input_ids"]}
        answers.append(logits_of(run_turn(model, whole, config, 4, cache=one.cache)))
    assert torch.equal(*answers)


def test_other_seconds_of_an_old_video_are_another_video() -> None:
    model, config = enabled_model("qwen2_5_vl"), drawn()
    inputs = random_inputs(model, 3, TWO_VIDEOS)
    one = run_turn(model, inputs, config, 4)
    whole = next_turn(inputs, answer_of(one, inputs), random_inputs(model, 4, "text only"))
    whole["second_per_grid_ts"] = torch.tensor([5.0, 0.5])
    with pytest.raises(ValueError, match=r"video 1 .* \(other second_per_grid_ts\)"):
        run_turn(model, whole, config, 4, cache=one.cache)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"second_per_grid_ts": [1.0]}, ValueError, "each of 2 video"),
        ({"second_per_grid_ts": [1.0, -2.0]}, ValueError, "positive"),
        ({"second_per_grid_ts": [1.0, float("nan")]}, ValueError, "positive"),
        ({"second_per_grid_ts": 2.0}, TypeError, "one number a video"),
        ({"second_per_grid_ts": ["1", "2"]}, TypeError, "one number a video"),
        ({"pixel_values_videos": None}, ValueError, r"2 new video\(s\), but pixel_values_videos"),
    ],
)
def test_bad_videos_are_refused(change: Any, error: type, message: str) -> None:
    model = enabled_model("qwen2_5_vl")
    inputs = {**random_inputs(model, 3, TWO_VIDEOS), **change}
    with pytest.raises(error, match=message):
        run_turn(model, inputs, drawn(), 2)


def test_each_family_has_its_own_layout_of_videos() -> None:
    """One run a video here, one a frame there: the other's placeholders do not fit."""
    timed, stamped = enabled_model("qwen2_5_vl"), enabled_model("qwen3_vl_moe")
    inputs = random_inputs(timed, 3, TWO_VIDEOS)
    inputs.pop("second_per_grid_ts")
    with pytest.raises(ValueError, match=r"describes 2 video\(s\).*placeholders of 1"):
        run_turn(stamped, inputs, drawn(), 2)
    with pytest.raises(ValueError, match=r"describes 2 video\(s\).*placeholders of 5"):
        run_turn(timed, random_inputs(stamped, 3, TWO_VIDEOS), drawn(), 2)
    inputs = random_inputs(timed, 3, TWO_VIDEOS)
    inputs["video_grid_thw"] = torch.tensor([[4, 4, 4], [2, 4, 4]])
    with pytest.raises(ValueError, match=r"\[12, 12\] video tokens.*makes \[16, 8\]"):
        run_turn(timed, inputs, drawn(), 2)


def test_sliding_windows_are_refused() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    model = enable_raincheck(random_model("qwen2_5_vl", text=sliding))
    inputs = random_inputs(model, 3, "one image")
    with pytest.raises(ValueError, match=r"layers \[2, 3\].*sliding window of 8"):
        run_turn(model, inputs, drawn(), 2)


# Qwen2.5-VL: windows in the vision tower

GRIDS = {"image": [[1, 8, 6], [1, 4, 10]], "video": [[3, 6, 6], [2, 6, 4]]}


@pytest.mark.parametrize("full", [[2], [0, 1]], ids=["last block whole", "last block windowed"])
@pytest.mark.parametrize("kind", list(GRIDS))
def test_what_selectors_see_is_in_source_order(kind: str, full: list[int]) -> None:
    model = random_model("qwen2_5_vl", seed=5, vision={"fullatt_block_indexes": full})
    grid = torch.tensor(GRIDS[kind])
    spied = SpiedVision(model, kind, grid, block=full[-1])
    out = vision.encode(model, spied.pixels, grid, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(out.embeds, spied.embeds)
    assert out.deepstack == []

    held = torch.stack([spied.held[i : i + 4].mean(0) for i in range(0, len(spied.held), 4)])
    torch.testing.assert_close(out.features, spied.in_source_order(held))
    assert distance(out.features, held) > 0.1  # the order matters

    frames = [h * w for t, h, w in grid.tolist() for _ in range(t)]
    assert [each.shape[-1] for each in spied.maps] == frames
    columns = torch.cat([each.mean(0).mean(0) for each in spied.maps])
    received = torch.stack([columns[i : i + 4].mean() for i in range(0, len(columns), 4)])
    expected = spied.in_source_order(received)
    torch.testing.assert_close(out.attention.double(), expected, rtol=1e-4, atol=1e-7)
    assert distance(expected, received) > 1e-4


def test_attention_within_windows_is_no_salience() -> None:
    model = random_model("qwen2_5_vl", seed=5, vision={"fullatt_block_indexes": []})
    enable_raincheck(model)
    inputs = random_inputs(model, 3, TWO_VIDEOS)
    cache = RaincheckCache(model)
    with pytest.raises(ValueError, match="fullatt_block_indexes is empty"):
        run_turn(model, inputs, RaincheckConfig(selector="saliency"), 2, cache=cache)
    assert cache.get_seq_length() == 0
    run_turn(model, inputs, RaincheckConfig(selector="mmtok"), 2, cache=cache)


# Sessions


def test_a_session_with_the_real_processor() -> None:
    """Images and videos over three turns; every logit is the reference's."""
    tokenizer = build_tokenizer()
    model = enable_raincheck(random_model("qwen2_5_vl", seed=5, text={"vocab_size": 1024}))
    for kind in ("image", "video"):
        setattr(model.config, f"{kind}_token_id", tokenizer.vocab[f"<|{kind}_pad|>"])
    shape = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    size = {"size": {"shortest_edge": 64, "longest_edge": 64 * 256}, **shape}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**size, cap_pixels_per_frame=False),
        chat_template=CHAT_TEMPLATE,
    )
    session = RaincheckSession(model, processor, drawn(chunk_size=5, guard_tokens=1))
    noise = np.random.default_rng(0)

    def picture() -> Image.Image:
        return Image.fromarray(noise.integers(0, 255, (24, 32, 3), dtype=np.uint8))

    reference, calls = Reference(model), []
    generate = model.generate
    model.generate = lambda **call: calls.append((call, generate(**call))) or calls[-1][1]
    media = {}
    for question in (
        {"videos": [[picture() for _ in range(6)]], "images": [picture()]},
        {},
        {"videos": [[picture() for _ in range(4)], [picture() for _ in range(2)]]},
    ):
        start = session.cache.get_seq_length()
        session.ask("What is it?", **question, max_new_tokens=5, output_logits=True)
        call, out = calls[-1]
        for key in [key for key in call if "pixel" in key or "grid" in key]:
            media[key] = torch.cat([media[key], call[key]]) if key in media else call[key]
        ids = call["input_ids"]
        kinds = (ids == model.config.image_token_id) + 2 * (ids == model.config.video_token_id)
        inputs = {"input_ids": ids, "mm_token_type_ids": kinds, **media}
        prompt = prompt_of(model, inputs, out, start=start)
        expected = follow(reference, prompt, answer_of(out, inputs), out)
        assert distance(logits_of(out), expected) < 1e-4
        reference.complete()
    assert media["second_per_grid_ts"].shape == (3,)
