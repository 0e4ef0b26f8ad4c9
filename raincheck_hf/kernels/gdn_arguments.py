"""What the launchers of ``gdn`` take, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from raincheck_hf.kernels.descriptor import HEADER, RECORD_SIZE
from raincheck_hf.kernels.gdn_prepare import FACTORS
from raincheck_hf.kernels.suffix_map import Convolution


@dataclass(frozen=True)
class Gates:
    """What makes g and beta from a layer's rows.

    Attributes:
        log_rate: A_log [HV].
        time_bias: dt_bias [HV].
    """

    log_rate: Tensor
    time_bias: Tensor


@dataclass(frozen=True)
class Tuning:
    """How kernels are cut. None of it changes what they compute.

    Attributes:
        width: columns of a state that one program holds: a power of two from 16 on; where K or V
            is less, all of them.
        warps: of a program.
        stages: of the scan's loop over row blocks.
        registers: the most that a thread may use; None leaves it to the compiler.
        early: what is needed later is asked for early: by ``prepare``, the states that the scan
            reads, into the L2 cache; by the scan, the lead tokens, before its first block.
        slab: columns that ``prepare`` convolves at a time: a power of two from 16 on; where K or V
            is less, all of them. Few are few instructions to fetch, and many waits for memory.
    """

    width: int
    warps: int
    stages: int = 1
    registers: int | None = None
    early: bool = True
    slab: int = 64


@dataclass(frozen=True)
class Workspace:
    """What ``prepare`` hands to ``scan``. One serves all layers of a graph, one after the other.

    Attributes:
        rows: R of a block: 16 or 32.
        queries: [N R, HK K], the N blocks' queries after the convolution, in the model's dtype.
        keys: [N R, HK K], likewise.
        values: [N R, HV V], likewise.
        inverses: fp32 [N, HV, R, R].
        scores: fp32 [N, HV, R, R].
        factors: fp32 [N, HV, 4, R].
        decays: fp32 [N, HV].
    """

    rows: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    inverses: Tensor
    scores: Tensor
    factors: Tensor
    decays: Tensor

    @classmethod
    def allocate(cls, conv: Convolution, capacity: int, rows: int | None = None) -> Workspace:
        """For chunks of up to ``capacity`` rows, on the device of the layer's weights.

        Args:
            conv: Any layer's convolution: all have the same sizes.
            capacity: 1 or more.
            rows: R, 16 or 32; None takes the smaller that holds the capacity, else 32. With blocks
                of 64, Triton 3.6 reads shared memory out of range (K = 128) and computes the
                scores' product to TF32 alone (four warps or more).

        Raises:
            ValueError: no rows, or blocks that the kernels do not know.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be 1 or more, got {capacity}")
        if rows is None:
            rows = min(32, max(16, triton.next_power_of_2(capacity)))
        if rows not in (16, 32):
            raise ValueError(f"rows of a block must be 16 or 32, got {rows}")
        weight, heads = conv.weight, conv.value_heads
        blocks = triton.cdiv(capacity, rows)
        key_row, value_row = conv.key_heads * conv.key_dim, heads * conv.value_dim

        def numbers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=weight.device)

        return cls(
            rows,
            weight.new_empty(blocks * rows, key_row),
            weight.new_empty(blocks * rows, key_row),
            weight.new_empty(blocks * rows, value_row),
            numbers(blocks, heads, rows, rows),
            numbers(blocks, heads, rows, rows),
            numbers(blocks, heads, FACTORS.value, rows),
            numbers(blocks, heads),
        )

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return len(self.keys)


def sizes(conv: Convolution, tuning: Tuning) -> dict[str, int]:
    """Constants of a launch, and how many parts a head's state and map have together."""
    channels, width = conv.weight.shape
    keys, values = conv.key_heads * conv.key_dim, conv.value_heads * conv.value_dim
    if channels != 2 * keys + values or width < 2 or not conv.weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous [{2 * keys + values}, 2 or more], got {told(conv.weight)}"
        )
    if conv.bias is not None and conv.bias.shape != (channels,):
        raise ValueError(f"bias must be [{channels}], got {told(conv.bias)}")
    if conv.value_heads % conv.key_heads:
        raise ValueError(f"{conv.value_heads} value heads for {conv.key_heads} key heads")
    check_powers(tuning.width, tuning.slab, conv.key_dim, conv.value_dim)
    part = min(tuning.width, conv.key_dim, conv.value_dim)
    return {
        "HK": conv.key_heads,
        "HV": conv.value_heads,
        "K": conv.key_dim,
        "V": conv.value_dim,
        "W": width,
        "WIDTH": part,
        "parts": (conv.key_dim + conv.value_dim) // part,
    }


def check_powers(*numbers: int) -> None:
    """Refuse a width or dims that no tile can have."""
    for number in numbers:
        if number < 16 or number & (number - 1):
            raise ValueError(f"width and dims must be powers of two from 16 on, got {number}")


def check_rows(
    mixed: Tensor, a: Tensor, b: Tensor, out: Tensor, conv: Convolution, gates: Gates
) -> None:
    heads, dtype = conv.value_heads, conv.weight.dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weights must be fp32, bf16 or fp16, got {dtype}")
    check_out(out, conv)
    for name, value, columns in (
        ("mixed", mixed, len(conv.weight)),
        ("a", a, heads),
        ("b", b, heads),
    ):
        shape = (len(out), columns)
        if value.shape != shape or value.dtype != dtype or value.stride(1) != 1:
            raise ValueError(
                f"{name} must be {dtype} {list(shape)} with columns side by side, got {told(value)}"
            )
    for name, value in (("log_rate", gates.log_rate), ("time_bias", gates.time_bias)):
        if value.shape != (heads,) or not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{heads}], got {told(value)}")


def check_out(out: Tensor, conv: Convolution) -> None:
    columns, dtype = conv.value_heads * conv.value_dim, conv.weight.dtype
    if out.ndim != 2 or out.shape[1] != columns or out.dtype != dtype or out.stride(1) != 1:
        raise ValueError(
            f"out must be {dtype} [T, {columns}] with columns side by side, got {told(out)}"
        )


def check_descriptor(header: Tensor, layer: Tensor) -> None:
    for name, value, entries in (
        ("header", header, HEADER.value),
        ("layer", layer, RECORD_SIZE.value),
    ):
        if value.shape != (entries,) or value.dtype != torch.int64 or not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous int64 [{entries}], got {told(value)}")


def check_workspace(workspace: Workspace, capacity: int, conv: Convolution) -> None:
    if not 1 <= capacity <= workspace.capacity:
        raise ValueError(f"the workspace holds 1 to {workspace.capacity} rows, got {capacity}")
    if workspace.keys.dtype != conv.weight.dtype:
        raise ValueError(
            f"the workspace is for {workspace.keys.dtype}, the layer has {conv.weight.dtype}"
        )


def told(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)} with strides {value.stride()}"
