"""The vision pass: what it returns, what it can tell afterwards, what it leaves behind."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from raincheck_hf.models import vision
from raincheck_hf.models.vision import encode, in_source_order, received_attention

IMAGES = torch.tensor([[1, 8, 6], [1, 4, 10]])
VIDEOS = torch.tensor([[3, 4, 6], [2, 6, 4]])


def pixels(grid: Tensor, seed: int = 1) -> Tensor:
    rows = int(grid.prod(-1).sum())
    return torch.randn(rows, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))


def stock(model: nn.Module, grid: Tensor, kind: str, seed: int = 1):
    run = model.get_image_features if kind == "image" else model.get_video_features
    with torch.no_grad():
        return run(pixels(grid, seed), grid, return_dict=True)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize(("kind", "grid"), [("image", IMAGES), ("video", VIDEOS)])
def test_embeddings_are_those_of_stock(model: nn.Module, kind: str, grid: Tensor) -> None:
    out, expected = encode(model, pixels(grid), grid, kind), stock(model, grid, kind)
    assert torch.equal(out.embeds, torch.cat(expected.pooler_output))
    layers = getattr(expected, "deepstack_features", None) or []
    assert len(out.deepstack) == len(layers)
    for ours, theirs in zip(out.deepstack, layers, strict=True):
        assert torch.equal(ours, torch.cat(theirs))
    assert out.grid == tuple((t, h // 2, w // 2) for t, h, w in grid.tolist())
    assert out.kind == (kind,) * len(grid)
    assert not out.embeds.requires_grad
    assert sum(out.sizes) == len(out.embeds)


def test_deepstack_is_there_only_on_qwen3_vl(model: nn.Module) -> None:
    layers = {"qwen3_vl": 2, "qwen3_5": 0}[model.config.model_type]
    assert len(encode(model, pixels(IMAGES), IMAGES).deepstack) == layers


@pytest.mark.parametrize(("kind", "grid"), [("image", IMAGES), ("video", VIDEOS)])
@pytest.mark.parametrize("limit", [1, 100, 3000, vision._MAX_SCORES])
def test_attention_is_the_column_mean_of_eager_attention(
    model: nn.Module, kind: str, grid: Tensor, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "_MAX_SCORES", limit)
    out = encode(model, pixels(grid), grid, kind)

    eager = copy.deepcopy(model)
    eager.model.visual.config._attn_implementation = "eager"
    maps: list[Tensor] = []
    block = eager.model.visual.blocks[-1].attn
    original = type(block).forward.__globals__["eager_attention_forward"]

    def spy(module: nn.Module, *args: object, **kwargs: object):
        result = original(module, *args, **kwargs)
        if module is block:
            maps.append(result[1])
        return result

    monkeypatch.setitem(type(block).forward.__globals__, "eager_attention_forward", spy)
    stock(eager, grid, kind)
    frames = [h * w for t, h, w in grid.tolist() for _ in range(t)]
    assert [m.shape[-1] for m in maps] == frames
    columns = torch.cat([m[0].double().mean(0).mean(0) for m in maps])
    expected = torch.stack([columns[i : i + 4].mean() for i in range(0, len(columns), 4)])
    torch.testing.assert_close(out.attention.double(), expected, rtol=1e-4, atol=1e-7)
    assert out.attention.std() > 0.05 * out.attention.mean()
    assert out.attention.dtype == torch.float32


def test_received_attention_against_loops() -> None:
    torch.manual_seed(0)
    lengths, heads, width = [4, 4, 12, 4], 3, 5
    query, key = torch.randn(2, sum(lengths), heads, width)
    expected = torch.zeros(sum(lengths), dtype=torch.float64)
    start = 0
    for length in lengths:
        for head in range(heads):
            for i in range(start, start + length):
                logits = torch.stack(
                    [
                        query[i, head].double() @ key[j, head].double()
                        for j in range(start, start + length)
                    ]
                )
                expected[start : start + length] += (0.4 * logits).softmax(0) / (heads * length)
        start += length
    found = received_attention(query, key, lengths, 0.4)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "grid"), [("image", IMAGES), ("video", VIDEOS)])
def test_features_are_the_mean_of_what_the_merger_reads(
    model: nn.Module, kind: str, grid: Tensor
) -> None:
    read: list[Tensor] = []
    handle = model.model.visual.merger.register_forward_pre_hook(
        lambda m, args: read.append(args[0])
    )
    out = encode(model, pixels(grid), grid, kind)
    handle.remove()
    expected = torch.stack([read[0][i : i + 4].mean(0) for i in range(0, len(read[0]), 4)])
    torch.testing.assert_close(out.features, expected)


def test_nothing_is_computed_before_it_is_asked_for(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = vision.received_attention
    monkeypatch.setattr(vision, "received_attention", lambda *a: calls.append(1) or real(*a))
    implementation = model.model.visual.config._attn_implementation
    out = encode(model, pixels(IMAGES), IMAGES)
    assert calls == []
    assert out.attention is out.attention
    assert calls == [1]
    assert model.model.visual.config._attn_implementation == implementation


def test_hooks_are_gone_after_a_pass_and_after_a_failed_one(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hooks(model)
    encode(model, pixels(IMAGES), IMAGES)
    assert hooks(model) == before
    monkeypatch.setattr(model.model.visual.merger.act_fn, "forward", None)
    with pytest.raises(TypeError):
        encode(model, pixels(IMAGES), IMAGES)
    monkeypatch.undo()
    assert hooks(model) == before
    encode(model, pixels(IMAGES), IMAGES)


def test_release_frees_activations_and_keeps_what_was_read(model: nn.Module) -> None:
    held: list[weakref.ref[Tensor]] = []
    tower = model.model.visual
    handles = [
        tower.merger.register_forward_pre_hook(lambda m, args: held.append(weakref.ref(args[0]))),
        tower.blocks[-1].register_forward_pre_hook(
            lambda m, args: held.append(weakref.ref(args[0]))
        ),
    ]
    out = encode(model, pixels(IMAGES), IMAGES)
    dropped = encode(model, pixels(IMAGES), IMAGES)
    for handle in handles:
        handle.remove()
    assert all(ref() is not None for ref in held)
    features = dropped.features
    # Read once, features no longer need the merger's input: held[1] and held[3] are the mergers'.
    assert [ref() is None for ref in held] == [False, False, False, True]
    features = out.features
    out.release()
    del dropped
    assert all(ref() is None for ref in held)
    assert out.features is features
    with pytest.raises(RuntimeError, match="released"):
        _ = out.attention


def test_threads_do_not_see_each_other(model: nn.Module) -> None:
    seeds = list(range(6))
    alone = [encode(model, pixels(IMAGES, seed), IMAGES) for seed in seeds]
    found: dict[int, vision.VisionOutput] = {}

    def work(seed: int) -> None:
        for _ in range(3):
            # A stock pass in between is not ours and must not be captured either.
            stock(model, VIDEOS, "video", seed)
            found[seed] = encode(model, pixels(IMAGES, seed), IMAGES)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in seeds:
        assert torch.equal(found[seed].embeds, alone[seed].embeds)
        assert torch.equal(found[seed].features, alone[seed].features)
        torch.testing.assert_close(found[seed].attention, alone[seed].attention)


def test_a_pass_is_alone_and_does_not_watch_other_threads(model: nn.Module) -> None:
    # Our pass is held in its last step, after its hooks have run, while two others arrive.
    alone = encode(model, pixels(IMAGES), IMAGES)
    tower, owner = model.model.visual, threading.get_ident()
    ours: list[int] = []
    began = threading.Event()

    def second_encode() -> None:
        began.set()
        encode(model, pixels(IMAGES, 5), IMAGES)
        ours.append(threading.get_ident())

    waiting = threading.Thread(target=second_encode)

    def hold(module: nn.Module, args: object) -> None:
        if threading.get_ident() == owner and not began.is_set():
            waiting.start()
            began.wait()
            waiting.join(0.2)
            assert ours == [], "a second encode() went ahead"
            other = threading.Thread(target=stock, args=(model, VIDEOS, "video", 9))
            other.start()
            other.join()

    handle = tower.merger.linear_fc2.register_forward_pre_hook(hold)
    out = encode(model, pixels(IMAGES), IMAGES)
    handle.remove()
    waiting.join()
    assert len(ours) == 1
    assert torch.equal(out.embeds, alone.embeds)
    assert torch.equal(out.features, alone.features)
    assert torch.equal(out.attention, alone.attention)


def test_in_source_order(model: nn.Module) -> None:
    images = encode(model, pixels(IMAGES), IMAGES)
    videos = encode(model, pixels(VIDEOS, 2), VIDEOS, "video")
    both = in_source_order([images, videos], ["video", "image", "image", "video"])
    assert both.grid == (videos.grid[0], *images.grid, videos.grid[1])
    first = videos.sizes[0]
    for read in (lambda o: o.embeds, lambda o: o.features, lambda o: o.attention):
        expected = torch.cat([read(videos)[:first], read(images), read(videos)[first:]])
        assert torch.equal(read(both), expected)
    assert len(both.deepstack) == len(images.deepstack)
    for layer, rows in enumerate(both.deepstack):
        assert torch.equal(rows[:first], videos.deepstack[layer][:first])
        assert torch.equal(rows[first : first + len(images.embeds)], images.deepstack[layer])
    assert in_source_order([images], ["image", "image"]) is images
    with pytest.raises(ValueError, match="prompt names"):
        in_source_order([images, videos], ["image", "video"])


def test_bad_input(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="grid counts 88 patches"):
        encode(model, pixels(IMAGES)[:-1], IMAGES)
    with pytest.raises(ValueError, match=r"\[items, 3\]"):
        encode(model, pixels(IMAGES), IMAGES[0])
    with pytest.raises(ValueError, match="kind"):
        encode(model, pixels(IMAGES), IMAGES, "audio")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no Qwen3-VL vision tower"):
        encode(nn.Linear(1, 1), pixels(IMAGES), IMAGES)
