"""One pass of the vision tower, and what selectors ask about it afterwards.

Shapes: N patches, n = N / g tokens, g the patches that the merger joins (2x2), d' the tower's
width, d the language model's, H heads. The processor puts a token's g patches in consecutive rows,
and towers that reorder tokens (`windows.py`) keep them so.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from raincheck_hf.kernels.choice import by_kernel
from raincheck_hf.models import windows

Kind = Literal["image", "video"]
Thunk = Callable[[], Tensor]

# Attention scores alive at once, fp32: 64 MiB, a small part of what the tower itself uses.
_MAX_SCORES = 2**24

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


class _Once:
    """A value made when first asked for; what it is made from is dropped then, or on release."""

    def __init__(self, make: Thunk) -> None:
        self._make: Thunk | None = make
        self._value: Tensor | None = None

    def get(self) -> Tensor:
        if self._value is None:
            if self._make is None:
                raise RuntimeError("released: ask for features and attention before release()")
            self._value = self._make()
            self._make = None
        return self._value

    def release(self) -> None:
        self._make = None


class VisionOutput:
    """Encoded images and videos, items one after the other.

    `features` and `attention` are computed when first read. Until then the activations that they
    need are held (a few tensors of N rows); `release()` or dropping this object frees them.

    Attributes:
        embeds: [n, d], after the merger: rows for the language model.
        deepstack: one [n, d] tensor per DeepStack layer; empty on models without.
        grid: (t, h, w) of each item in merged units, t·h·w tokens.
        kind: `"image"` or `"video"` of each item.
    """

    def __init__(
        self,
        embeds: Tensor,
        deepstack: Sequence[Tensor],
        grid: Sequence[tuple[int, int, int]],
        kind: Sequence[Kind],
        features: Thunk,
        attention: Thunk,
    ) -> None:
        self.embeds = embeds
        self.deepstack = list(deepstack)
        self.grid = tuple(grid)
        self.kind = tuple(kind)
        self._features = _Once(features)
        self._attention = _Once(attention)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each item."""
        return [t * h * w for t, h, w in self.grid]

    @property
    def features(self) -> Tensor:
        """[n, d'], mean of each token's patches before the merger.

        Raises:
            RuntimeError: first read after `release()`.
        """
        return self._features.get()

    @property
    def attention(self) -> Tensor:
        """[n] fp32, attention received in the last vision block; see `received_attention`.

        On towers with windows it is the last block that attends to whole frames.

        Raises:
            RuntimeError: first read after `release()`.
            ValueError: the tower attends within windows only.
        """
        return self._attention.get()

    def release(self) -> None:
        """Let go of vision activations. What was read before stays readable."""
        self._features.release()
        self._attention.release()


@dataclass(frozen=True)
class TowerPass:
    """What another implementation of a tower returns for one pass of N patches.

    Attributes:
        embeds: [n, d], after the merger.
        deepstack: One [n, d] a DeepStack layer.
        merger_input: [N, d'], what went into the merger.
        queries_keys: [N, 2, H, e] of the last block, rotated.
        normaliser: fp32 [H, N], log2 Σ_j exp(score_ij) of the last block, or None.
        lengths: Patches of each attention segment.
    """

    embeds: Tensor
    deepstack: list[Tensor]
    merger_input: Tensor
    queries_keys: Tensor
    normaliser: Tensor | None
    lengths: list[int]

    def attention(self, tower: Any, grid_thw: Tensor) -> Tensor:
        """Attention received by each token in the last block, fp32 [n]."""
        query, key = self.queries_keys.unbind(1)
        scale = tower.blocks[-1].attn.scaling
        received = received_attention(query, key, self.lengths, scale, self.normaliser)
        return _token_features(tower, grid_thw, received).squeeze(1)


TowerRun = Callable[[Any, Tensor, list[list[int]]], TowerPass]


def encode(
    model: Any,
    pixel_values: Tensor,
    grid_thw: Tensor,
    kind: Kind = "image",
    run_tower: TowerRun | None = None,
) -> VisionOutput:
    """Run the model's own vision tower once over all items of one kind, without gradients.

    Temporary hooks keep references to activations; nothing is computed for them here, and they are
    gone when this returns or raises. Passes of one model run one at a time (a lock per tower), and
    a hook looks only at the thread that set it, so that threads do not see each other's pictures.

    Args:
        model: a model of a supported architecture, or one with the same `get_image_features`,
            `get_video_features` and vision tower.
        pixel_values: [N, c] patches, as the processor makes them.
        grid_thw: [items, 3] in patches, as the processor makes it.
        kind: which of the two feature methods to call.
        run_tower: another implementation of the tower's forward; None for its own.

    Raises:
        ValueError: an unknown kind, a malformed grid, or a grid that counts other than N patches.
        TypeError: the model has no such vision tower.
    """
    if kind not in ("image", "video"):
        raise ValueError(f"kind must be 'image' or 'video', got {kind!r}")
    if grid_thw.ndim != 2 or grid_thw.shape[1] != 3:
        raise ValueError(f"grid_thw must be [items, 3], got {list(grid_thw.shape)}")
    sizes = grid_thw.tolist()
    patches = [t * h * w for t, h, w in sizes]
    if sum(patches) != len(pixel_values):
        raise ValueError(
            f"the {kind} grid counts {sum(patches)} patches, "
            f"but pixel values have {len(pixel_values)} rows"
        )
    tower = _tower(model)
    grid_thw = grid_thw.to(pixel_values.device)
    block = windows.whole_frame_block(tower)
    with torch.no_grad(), _lock(tower):
        if run_tower is None:
            embeds, deepstack, seen = _stock_pass(model, tower, block, pixel_values, grid_thw, kind)
            merger_input = seen.merger_input
            attention: Thunk = partial(
                _token_attention, tower, block, grid_thw, seen.block_input, seen.block_kwargs
            )
        else:
            own = run_tower(tower, pixel_values, sizes)
            embeds, deepstack, merger_input = own.embeds, own.deepstack, own.merger_input
            attention = partial(own.attention, tower, grid_thw)
    side = int(tower.spatial_merge_size)
    grid = [(t, h // side, w // side) for t, h, w in sizes]
    return VisionOutput(
        embeds=embeds,
        deepstack=deepstack,
        grid=grid,
        kind=[kind] * len(grid),
        features=partial(_token_features, tower, grid_thw, merger_input),
        attention=attention,
    )


def _stock_pass(
    model: Any, tower: Any, block: int | None, pixel_values: Tensor, grid_thw: Tensor, kind: Kind
) -> tuple[Tensor, list[Tensor], _Seen]:
    """Embeddings, DeepStack features and what was seen, of the tower's own forward."""
    run = model.get_image_features if kind == "image" else model.get_video_features
    with _watch(tower, block) as seen:
        output = run(pixel_values, grid_thw, return_dict=True)
    layers = getattr(output, "deepstack_features", None) or ()
    return torch.cat(output.pooler_output), [torch.cat(layer) for layer in layers], seen


def in_source_order(outputs: Sequence[VisionOutput], kinds: Sequence[Kind]) -> VisionOutput:
    """Join passes over images and over videos into the order in which a prompt names them.

    Args:
        outputs: each holds its items in the order of the prompt.
        kinds: the kind of each item of the prompt, in order.

    Raises:
        ValueError: `kinds` does not name exactly the items of `outputs`.
    """
    waiting: dict[Kind, list[tuple[VisionOutput, int]]] = {"image": [], "video": []}
    for out in outputs:
        for i, kind in enumerate(out.kind):
            waiting[kind].append((out, i))
    counts = {kind: len(items) for kind, items in waiting.items()}
    if counts != {kind: kinds.count(kind) for kind in waiting}:
        raise ValueError(f"the prompt names {list(kinds)}, but there are features for {counts}")
    if len(outputs) == 1:
        return outputs[0]
    order = [waiting[kind].pop(0) for kind in kinds]

    def joined(read: Callable[[VisionOutput], Tensor]) -> Tensor:
        pieces = {id(out): read(out).split(out.sizes) for out in outputs}
        return torch.cat([pieces[id(out)][i] for out, i in order])

    return VisionOutput(
        embeds=joined(lambda out: out.embeds),
        deepstack=[
            joined(lambda out, layer=layer: out.deepstack[layer])  # type: ignore[misc]
            for layer in range(len(outputs[0].deepstack))
        ],
        grid=[out.grid[i] for out, i in order],
        kind=list(kinds),
        features=lambda: joined(lambda out: out.features),
        attention=lambda: joined(lambda out: out.attention),
    )


@torch.no_grad()
def received_attention(
    query: Tensor,
    key: Tensor,
    lengths: Sequence[int],
    scale: float,
    normaliser: Tensor | None = None,
) -> Tensor:
    """Mean attention that each patch receives from the patches of its own segment.

    On an NVIDIA GPU a kernel keeps the map in registers, a tile at a time. Elsewhere, and for
    heads wider than 256, segments of one length share a batch: only a block of queries of
    softmax(q kᵀ·scale) exists at a time, at most 2^24 scores, or one query's.

    Args:
        query: [N, H, e] after the rotary embedding.
        key: [N, H, e] likewise.
        lengths: patches of each segment (an image, or a frame), adding up to N.
        scale: of the logits, above 0.
        normaliser: fp32 [H, N], log2 of each query's sum of exponentials, which attention may have
            returned, half of the kernel's work; used by the kernel. None finds it.

    Returns:
        fp32 [N], mean over heads and over the segment's queries; each segment adds up to 1.
    """
    if by_kernel(query) and query.dtype in _KERNEL_DTYPES and query.shape[2] <= 256:
        from raincheck_hf.kernels.column_sums import column_means

        return column_means(query, key, lengths, scale, normaliser=normaliser)
    received, start = [], 0
    for length, run in itertools.groupby(lengths):
        count = len(list(run))
        shape = (count, length, *query.shape[1:])
        q, k = (
            x[start : start + count * length].reshape(shape).transpose(1, 2).float()
            for x in (query, key)
        )
        start += count * length
        per_query = q.shape[1] * length
        segments = max(1, _MAX_SCORES // (per_query * length))
        rows = max(1, _MAX_SCORES // per_query)
        for q_part, k_part in zip(q.split(segments), k.split(segments), strict=True):
            columns = q.new_zeros(len(q_part), length)
            for block in q_part.split(rows, dim=2):
                logits = block @ k_part.transpose(2, 3) * scale
                columns += logits.softmax(-1).mean(1).sum(1)
            received.append((columns / length).flatten())
    return torch.cat(received)


@dataclass
class _Seen:
    """References that the hooks of one pass took."""

    block_input: Tensor
    block_kwargs: dict[str, Any]
    merger_input: Tensor


@contextmanager
def _watch(tower: Any, block: int | None) -> Iterator[_Seen]:
    """Hooks on a block and the merger for the time of one pass in this thread."""
    owner = threading.get_ident()
    seen = _Seen(torch.empty(0), {}, torch.empty(0))

    def at_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == owner:
            seen.block_input = args[0] if args else kwargs["hidden_states"]
            seen.block_kwargs = kwargs

    def at_merger(module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == owner:
            seen.merger_input = args[0]

    handles = [tower.merger.register_forward_pre_hook(at_merger)]
    if block is not None:
        handles.append(tower.blocks[block].register_forward_pre_hook(at_block, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tower(model: Any) -> Any:
    """The vision tower of a model for generation, or of its inner model."""
    tower = getattr(getattr(model, "model", model), "visual", None)
    if not all(hasattr(tower, part) for part in ("blocks", "merger", "spatial_merge_size")):
        raise TypeError(
            f"{type(model).__name__} has no Qwen3-VL vision tower (model.visual with blocks and "
            "merger); models of the supported architectures have"
        )
    return tower


def _lock(tower: nn.Module) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(tower, threading.Lock())


def _token_features(tower: Any, grid_thw: Tensor, rows: Tensor) -> Tensor:
    """Mean of each token's patch rows [N, x] of the tower, in source order, [n, x]."""
    group = int(tower.spatial_merge_size) ** 2
    means = rows.reshape(len(rows) // group, group, -1).mean(1)
    return windows.in_source_order(tower, grid_thw, means)


@torch.no_grad()
def _token_attention(
    tower: Any, index: int | None, grid_thw: Tensor, hidden: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """Attention received by each token in the block with the given index, fp32 [n].

    Calls the block's own norm and projection as modules, so that adapters and offloading apply.

    Raises:
        ValueError: there is no such block.
    """
    if index is None:
        raise ValueError(
            "this selector asks for the attention that tokens receive in their frame, but every "
            "block of this vision tower attends within windows (fullatt_block_indexes is empty); "
            "choose a selector that does without, such as 'mmtok' or 'divprune'"
        )
    block = tower.blocks[index]
    attention = block.attn
    with _lock(tower):  # hooks may bring weights in and take them away
        projected = attention.qkv(block.norm1(hidden))
    query, key, _ = projected.reshape(len(hidden), 3, attention.num_heads, -1).unbind(1)
    cos, sin = (part.float().unsqueeze(1) for part in kwargs["position_embeddings"])
    lengths = kwargs["cu_seqlens"].diff().tolist()
    received = received_attention(
        _rotate(query, cos, sin), _rotate(key, cos, sin), lengths, attention.scaling
    )
    return _token_features(tower, grid_thw, received).squeeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, H, e] in fp32, back in the dtype that the tower computes with."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
