# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Attention of a vision block, within segments, from its joint projection. See VISION.md.

Twin: `attend_plain`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from raincheck_hf.kernels.launch import Repeated
from raincheck_hf.kernels.segments import block_table, split_width

_log = logging.getLogger("raincheck_hf")
_LOG2_E = math.log2(math.e)

# Weights are 2^(s - own score - _LIFT): powers from far below the own score to far above it fit.
_LIFT = tl.constexpr(60.0)
_MOST = tl.constexpr(2.0**60)  # of a row's sum of weights; a row with more is done again


@triton.jit
def _tile(source, line, at, COLUMN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] of a key or value head; zero behind its last column and the last patch."""
    return tl.reshape(source.load([line, at, COLUMN]), (ROWS, WIDTH))


@triton.jit
def _scores(
    head, tail, heads, tails, line, at, HEAD: tl.constexpr, TAIL: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q kᵀ, fp32 [ROWS, KEYS]."""
    key = _tile(heads, line, at, 0, KEYS, HEAD)
    scores = tl.dot(head, tl.trans(key), input_precision=PRECISION)
    if TAIL > 0:
        rest = _tile(tails, line, at, HEAD, KEYS, TAIL)
        scores = tl.dot(tail, tl.trans(rest), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _step(
    head, tail, heads, tails, key_line, value_line, at, stop, scale, base, total, mixed, rest,
    HEAD: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the sums."""
    ROWS: tl.constexpr = head.shape[0]
    scores = _scores(head, tail, heads, tails, key_line, at, HEAD, TAIL, KEYS, PRECISION)
    weight = tl.exp2(scores * scale - base[:, None])
    if MASKED:
        weight = tl.where((at + tl.arange(0, KEYS) < stop)[None, :], weight, 0.0)
    # Eight sums a row: adding within a thread is all that a tile asks for.
    total += tl.sum(tl.reshape(weight, (ROWS, KEYS // 8, 8)), 1)
    low = weight.to(head.dtype)
    value = _tile(heads, value_line, at, 0, KEYS, HEAD)
    mixed = tl.dot(low, value, mixed, input_precision=PRECISION)
    if TAIL > 0:
        value = _tile(tails, value_line, at, HEAD, KEYS, TAIL)
        rest = tl.dot(low, value, rest, input_precision=PRECISION)
    return total, mixed, rest


@triton.jit
def _weighed(
    head, tail, heads, tails, key_line, value_line, start, stop, scale, base,
    HEAD: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_j w_j and Σ_j w_j v_j over a segment, w_j = 2^(s_j·scale − base).

    Args:
        MASKED: Whether every tile is masked, which makes for less code.
    """
    ROWS: tl.constexpr = head.shape[0]
    total = tl.zeros([ROWS, 8], tl.float32)
    mixed = tl.zeros([ROWS, HEAD], tl.float32)
    rest = tl.zeros([ROWS, TAIL if TAIL > 0 else 16], tl.float32)
    whole = start
    if not MASKED:
        whole = stop - (stop - start) % KEYS
        for at in range(start, whole, KEYS):
            total, mixed, rest = _step(
                head, tail, heads, tails, key_line, value_line, at, stop, scale, base,
                total, mixed, rest, HEAD, TAIL, KEYS, False, PRECISION,
            )  # fmt: skip
    # One turn at most; behind an `if`, ptxas 12.8 gets it wrong (VISION.md).
    for at in range(whole, stop, KEYS):
        total, mixed, rest = _step(
            head, tail, heads, tails, key_line, value_line, at, stop, scale, base,
            total, mixed, rest, HEAD, TAIL, KEYS, True, PRECISION,
        )  # fmt: skip
    return tl.sum(total, 1), mixed, rest


@triton.jit(do_not_specialize=["patches"])
def _attend(
    qkv, heads, tails, blocks, out, normaliser, patches, pitch, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, NORMALISES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one head.

    Args:
        qkv: [N, 3, HEADS, DIM], rows ``pitch`` apart.
        heads: Descriptor of qkv as [3 HEADS, N, DIM] in tiles of [1, KEYS, HEAD].
        tails: The same in tiles of [1, KEYS, TAIL].
        blocks: int32 [blocks, 3], where a block and its segment start, and where the segment ends.
        out: [N, HEADS * DIM], written.
        normaliser: fp32 [HEADS, N], written where NORMALISES.
        scale: fp32, of scores in powers of 2.
    """
    blocks += tl.program_id(0) * 3
    line = tl.program_id(1)
    first, start, stop = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    place = (first + tl.arange(0, ROWS)).to(tl.int64)
    fits = place < stop
    part = tl.arange(0, HEAD)
    own = qkv + place[:, None] * pitch + line * DIM + part[None, :]
    head = tl.load(own, mask=fits[:, None], other=0.0)
    key = tl.load(own + HEADS * DIM, mask=fits[:, None], other=0.0)
    self_score = tl.sum(head.to(tl.float32) * key.to(tl.float32), 1)
    tail = head
    if TAIL > 0:
        near = HEAD + tl.arange(0, TAIL)
        inside = fits[:, None] & (near < DIM)[None, :]
        own = qkv + place[:, None] * pitch + line * DIM + near[None, :]
        tail = tl.load(own, mask=inside, other=0.0)
        key = tl.load(own + HEADS * DIM, mask=inside, other=0.0)
        self_score += tl.sum(tail.to(tl.float32) * key.to(tl.float32), 1)

    base = self_score * scale + _LIFT
    total, mixed, rest = _weighed(
        head, tail, heads, tails, HEADS + line, 2 * HEADS + line, start, stop, scale, base,
        HEAD, TAIL, KEYS, False, PRECISION,
    )  # fmt: skip
    # Not a number compares false, and is done again too.
    if tl.min((total < _MOST).to(tl.int32), 0) == 0:
        base = tl.full([ROWS], -float("inf"), tl.float32)
        for at in range(start, stop, KEYS):
            scores = _scores(
                head, tail, heads, tails, HEADS + line, at, HEAD, TAIL, KEYS, PRECISION
            )
            seen = (at + tl.arange(0, KEYS) < stop)[None, :]
            base = tl.maximum(base, tl.max(tl.where(seen, scores, -float("inf")), 1))
        base *= scale
        total, mixed, rest = _weighed(
            head, tail, heads, tails, HEADS + line, 2 * HEADS + line, start, stop, scale, base,
            HEAD, TAIL, KEYS, True, PRECISION,
        )  # fmt: skip
    share = 1.0 / total
    row = out + place[:, None] * (HEADS * DIM) + line * DIM
    tl.store(row + part[None, :], (mixed * share[:, None]).to(out.dtype.element_ty), fits[:, None])
    if TAIL > 0:
        near = HEAD + tl.arange(0, TAIL)
        inside = fits[:, None] & (near < DIM)[None, :]
        tl.store(row + near[None, :], (rest * share[:, None]).to(out.dtype.element_ty), inside)
    if NORMALISES:
        tl.store(normaliser + line.to(tl.int64) * patches + place, base + tl.log2(total), fits)


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch.

    Attributes:
        rows: Queries of a program, a power of two, 16 or more (64 a warp group on a GPU).
        keys: Keys at a time, a power of two, 16 or more.
        warps: Of a program.
        stages: Tiles of keys under way.
        registers: Of a thread at most, so that more programs fit a processor; None for no bound.
    """

    rows: int = 128
    keys: int = 64
    warps: int = 4
    stages: int = 3
    registers: int | None = None


def made_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is worth running: with tiles copied by descriptor and bf16 products."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and dtype == torch.bfloat16


def takes(dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel takes heads of ``dim`` in ``dtype``.

    fp16 is left out: it does not hold the powers that the weights are.
    """
    return dtype in (torch.bfloat16, torch.float32) and 16 <= dim <= 128 and dim % 8 == 0


@cache
def compiled_rightly(
    device: torch.device, dtype: torch.dtype, heads: int, dim: int, tiles: Tiles
) -> bool:
    """Whether this installation's compiler makes of the kernel what it says; tried once.

    ptxas 12.8 was seen to miscompile another form of it (VISION.md). The same binary runs whatever
    the number of patches, so that a small case tells.
    """
    try:
        apart = max(_apart(device, dtype, heads, dim, tiles))
    except Exception as error:  # whatever a compiler raises
        _log.warning("the vision kernel is not used: it was not compiled (%s)", error)
        return False
    if not apart < 0.02:
        _log.warning("the vision kernel is not used: it was compiled wrongly (off by %.2g)", apart)
    return apart < 0.02


def _apart(
    device: torch.device, dtype: torch.dtype, heads: int, dim: int, tiles: Tiles
) -> list[float]:
    """Relative distance of both forms of the kernel from the twin, on a small case."""
    lengths = [2 * tiles.keys + 17, 5]
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, heads, dim, generator=draw).to(device, dtype)
    blocks = block_table(lengths, tiles.rows, device)
    expected = attend_plain(qkv, lengths, dim**-0.5)[0].float()
    noted = qkv.new_empty(heads, len(qkv), dtype=torch.float32)
    found = [
        attend(qkv, blocks, dim**-0.5, normaliser=normaliser, tiles=tiles).float()
        for normaliser in (None, noted)
    ]
    return [float((each - expected).norm() / expected.norm()) for each in found]


def attend(
    qkv: Tensor,
    blocks: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    normaliser: Tensor | None = None,
    tiles: Tiles = Tiles(),
) -> Tensor:
    """Attention of each patch to the patches of its segment, one launch.

    Args:
        qkv: [N, 3, H, dim], contiguous, bf16 or fp32 (see `takes`), q and k rotated.
        blocks: int32 [blocks, 3], `segments.block_table` of the segments and ``tiles.rows``.
        scale: Of the scores.
        out: [N, H * dim] in qkv's dtype, contiguous, written; None makes one.
        normaliser: fp32 [H, N], contiguous, written: log2 Σ_j exp(s_ij). None: not wanted.
        tiles: Sizes of the launch.

    Returns:
        ``out``.

    Raises:
        ValueError: A shape, dtype or layout is not as above.
    """
    run = repeated_attend(qkv, blocks, scale, normalises=normaliser is not None, tiles=tiles)
    return run(qkv, out, normaliser)


def repeated_attend(
    like: Tensor,
    blocks: Tensor,
    scale: float,
    *,
    normalises: bool = False,
    tiles: Tiles = Tiles(),
) -> Callable[..., Tensor]:
    """`attend` for many tensors like ``like``: looked up once.

    Args:
        like: As `attend`'s qkv.
        blocks: As there.
        scale: As there.
        normalises: Whether normalisers are written.
        tiles: As there.

    Returns:
        What takes qkv, out (None makes one) and the normaliser (None if not wanted).

    Raises:
        ValueError: Here or by what is returned: as `attend`.
    """
    if like.ndim != 4 or like.shape[1] != 3:
        raise ValueError(f"qkv must be [N, 3, H, dim], got {list(like.shape)}")
    patches, _, count, dim = shape = like.shape
    dtype = like.dtype
    if not takes(dtype, dim):
        raise ValueError(
            f"heads must be bf16 or fp32 of 16 to 128 columns, a multiple of 8; got {dtype} of "
            f"{dim}"
        )
    if blocks.dtype != torch.int32 or blocks.ndim != 2 or blocks.shape[1] != 3:
        raise ValueError(f"blocks must be int32 [blocks, 3], got {blocks.dtype} {blocks.shape}")
    head, tail = split_width(dim)
    pitch = 3 * count * dim
    options = {
        "HEADS": count, "DIM": dim, "HEAD": head, "TAIL": tail, "ROWS": tiles.rows,
        "KEYS": tiles.keys, "NORMALISES": normalises, "PRECISION": "ieee",
        "num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers,
    }  # fmt: skip
    launch = Repeated(_attend, (len(blocks), count), options)

    def run(qkv: Tensor, out: Tensor | None = None, normaliser: Tensor | None = None) -> Tensor:
        if out is None:
            out = qkv.new_empty(patches, count * dim)
        sums = [normaliser] if normaliser is not None else []
        if len(sums) != normalises:
            raise ValueError(f"a launch with normalises={normalises} got {normaliser}")
        for part, kind, want in (
            (qkv, dtype, shape),
            (out, dtype, (patches, count * dim)),
            *((part, torch.float32, (count, patches)) for part in sums),
        ):
            if part.shape != want or part.dtype != kind or not part.is_contiguous():
                raise ValueError(
                    f"want contiguous {kind} {list(want)}, got {part.dtype} {list(part.shape)} "
                    f"with strides {list(part.stride())}"
                )
        if len(blocks) == 0:
            return out
        # Heads of all three kinds, one behind the other; a tile ends with its head's last column.
        layout = ([3 * count, patches, dim], [dim, pitch, 1])
        heads = TensorDescriptor(qkv, *layout, [1, tiles.keys, head])
        tails = TensorDescriptor(qkv, *layout, [1, tiles.keys, tail or head])
        with torch.cuda.device_of(qkv):
            launch(
                qkv, heads, tails, blocks, out, normaliser if sums else out,
                patches, pitch, scale * _LOG2_E,
            )  # fmt: skip
        return out

    return run


def attend_plain(qkv: Tensor, lengths: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """Twin of `attend`: what it writes to ``out`` and ``normaliser``, a segment at a time."""
    mixed, sums = [], []
    for part in qkv.split(list(lengths)):
        wide = part if part.dtype == torch.float64 else part.float()
        q, k, v = wide.permute(1, 2, 0, 3).unbind(0)
        scores = q @ k.transpose(1, 2) * scale
        mixed.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1).to(qkv.dtype))
        sums.append(scores.logsumexp(-1) * _LOG2_E)
    return torch.cat(mixed), torch.cat(sums, 1)
