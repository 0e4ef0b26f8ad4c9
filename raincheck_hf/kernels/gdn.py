"""Gated-delta-rule layers in Triton: plain steps, chunk passes, boundary repair and join.

A pass of one layer is one launch without a chunk (``step``), else two (``prepare``, ``scan``). What
differs between passes is read on the device, from the descriptor; GDN.md has the derivation, and
``gdn_twin`` the same in plain PyTorch. The short convolution has any width W of 2 or more.

What a pass writes through the record of its layer, with lead the recorded tokens after it (LEAD,
plus one where TOKEN and RECORD, but at most W - 1; 0 where TOKEN without RECORD):

===================  ===========================================================================
PREFIX_STATE_OUT,    where CHUNK > 0
PREFIX_HISTORY_OUT
LIVE_STATE_OUT,      where TOKEN; and where CHUNK > 0 and lead > 0: the join, also without a
LIVE_HISTORY_OUT     token. (With a chunk and lead = 0 the caller's live side is its new prefix.)
LEAD_INPUTS_OUT,     where TOKEN and RECORD and LEAD < W - 1 (an append): the first LEAD + 1
LEAD_G_OUT,          columns or rows, old ones copied; what is behind them is left as it was
LEAD_BETA_OUT
LEAD_STATE_OUT       at an append; and where CHUNK > 0 and lead > 0
PHI_OUT              where TOKEN and RECORD and LEAD = W - 1
===================  ===========================================================================

Nothing else is written but the rows of ``out``. A join reads Phi if there is a map after the pass
(MAPPED, or PHI_OUT just written). No address in the record may be null or unaligned (16 bytes)
where it is read or written as above; elsewhere it is not looked at.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from raincheck_hf.kernels.gdn_arguments import (
    Gates,
    Tuning,
    Workspace,
    check_descriptor,
    check_out,
    check_powers,
    check_rows,
    check_workspace,
    sizes,
    told,
)
from raincheck_hf.kernels.gdn_join import join_kernel
from raincheck_hf.kernels.gdn_prepare import KINDS, prepare_kernel
from raincheck_hf.kernels.gdn_scan import scan_kernel
from raincheck_hf.kernels.gdn_step import map_step_kernel, step_kernel
from raincheck_hf.kernels.suffix_map import Convolution

__all__ = ["Gates", "Tuning", "Workspace", "join", "map_step", "prepare", "scan", "step"]

STEP = MAP_STEP = Tuning(32, 4)
SCAN = Tuning(16, 4)
JOIN = Tuning(32, 4)
PREPARE = Tuning(32, 8, slab=128, registers=128)


def step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    conv: Convolution,
    gates: Gates,
    header: Tensor,
    layer: Tensor,
    *,
    tuning: Tuning = STEP,
    pdl: bool = False,
) -> None:
    """A pass without chunk rows, one launch; CHUNK must be 0.

    Args:
        mixed: [1, C] pre-convolution inputs in the model's dtype; in this and the next three the
            row stride is free.
        a: [1, HV], in the model's dtype.
        b: [1, HV], in the model's dtype.
        out: [1, HV V], written, in the model's dtype.
        conv: The layer's; weight [C, W] in the model's dtype.
        gates: The layer's.
        header: int64, see ``descriptor``.
        layer: int64, the layer's record.
        tuning: See there; no stages.
        pdl: Launch with programmatic dependence: start beside the launch before, and wait for its
            end on the device. NVIDIA from Hopper on.

    Raises:
        ValueError: a shape, dtype, stride or size is not as above.
    """
    constants = sizes(conv, tuning)
    check_rows(mixed, a, b, out, conv, gates)
    check_descriptor(header, layer)
    if len(mixed) != 1:
        raise ValueError(f"a step has one row, got {len(mixed)}; prepare and scan take chunk rows")
    step_kernel[(conv.value_heads, constants.pop("parts"))](
        mixed,
        a,
        b,
        out,
        conv.taps,
        _bias(conv),
        gates.log_rate,
        gates.time_bias,
        header,
        layer,
        **constants,
        BIAS=conv.bias is not None,
        **_launch(tuning, pdl),
    )


def prepare(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    conv: Convolution,
    gates: Gates,
    header: Tensor,
    layer: Tensor,
    workspace: Workspace,
    *,
    tuning: Tuning = PREPARE,
    pdl: bool = False,
    leads: bool = False,
) -> None:
    """First launch of a pass with chunk rows: what needs no state, and all of the decode row.

    Arguments and errors as ``step``, with T = capacity + 1 rows of which the last is the decode
    row. Its output, its record and the prefix history are final after this launch; the live
    state is so but for the join.

    Args:
        workspace: With room for the capacity.
        leads: Let the scan start at once where it has ``pdl``; with ``pdl`` here, it is so anyway.
            NVIDIA from Hopper on.
    """
    constants = sizes(conv, tuning)
    check_rows(mixed, a, b, out, conv, gates)
    check_descriptor(header, layer)
    capacity = len(mixed) - 1
    check_workspace(workspace, capacity, conv)
    units = KINDS.value * conv.value_heads * triton.cdiv(capacity, workspace.rows)
    prepare_kernel[(units + conv.value_heads * constants.pop("parts"),)](
        mixed,
        mixed.stride(0),
        a,
        a.stride(0),
        b,
        b.stride(0),
        out,
        out.stride(0),
        conv.taps,
        _bias(conv),
        gates.log_rate,
        gates.time_bias,
        header,
        layer,
        workspace.queries,
        workspace.keys,
        workspace.values,
        workspace.inverses,
        workspace.scores,
        workspace.factors,
        workspace.decays,
        capacity,
        units,
        **constants,
        TAPS=_taps(conv),
        ROWS=workspace.rows,
        SLAB=tuning.slab,
        BIAS=conv.bias is not None,
        AHEAD=tuning.early,
        LEADS=leads or pdl,
        **_launch(tuning, pdl),
    )


def scan(
    out: Tensor,
    conv: Convolution,
    header: Tensor,
    layer: Tensor,
    workspace: Workspace,
    *,
    tuning: Tuning = SCAN,
    pdl: bool = False,
) -> None:
    """Second launch of a pass with chunk rows: from the prefix checkpoint to its end, and the join.

    Arguments and errors as ``prepare``, which filled the workspace. With ``pdl``, the descriptor
    and the prefix checkpoint are read while the launch before still runs.
    """
    constants = sizes(conv, tuning)
    check_out(out, conv)
    check_descriptor(header, layer)
    capacity = len(out) - 1
    check_workspace(workspace, capacity, conv)
    constants.pop("parts")
    scan_kernel[(conv.value_heads, conv.value_dim // constants["WIDTH"])](
        out,
        out.stride(0),
        conv.taps,
        _bias(conv),
        header,
        layer,
        workspace.queries,
        workspace.keys,
        workspace.values,
        workspace.inverses,
        workspace.scores,
        workspace.factors,
        workspace.decays,
        capacity,
        **constants,
        ROWS=workspace.rows,
        TAPS=_taps(conv),
        HEIGHT=_height(conv, tuning),
        EARLY=tuning.early,
        BIAS=conv.bias is not None,
        STAGES=tuning.stages,
        **_launch(tuning, pdl),
    )


def map_step(
    phi: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    *,
    tuning: Tuning = MAP_STEP,
    pdl: bool = False,
) -> None:
    """``suffix_map.map_step`` in one launch, by itself; ``step`` does it on the way.

    Args:
        phi: fp32 [HV, K, K]; this and all others contiguous.
        k: fp32 [HV, K], L2-normalised.
        g: fp32 [HV].
        beta: fp32 [HV].
        out: fp32 [HV, K, K], written; not phi.
        tuning: See there; no stages.
        pdl: As for ``step``.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or out is phi.
    """
    heads, dim = k.shape
    for name, value, shape in (
        ("phi", phi, (heads, dim, dim)),
        ("k", k, (heads, dim)),
        ("g", g, (heads,)),
        ("beta", beta, (heads,)),
        ("out", out, (heads, dim, dim)),
    ):
        if value.shape != shape or value.dtype != torch.float32 or not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous fp32 {list(shape)}, got {told(value)}")
    if out.data_ptr() == phi.data_ptr():
        raise ValueError("out must not be phi")
    check_powers(tuning.width, dim)
    width = min(tuning.width, dim)
    map_step_kernel[(heads, dim // width)](
        phi, k, g, beta, out, K=dim, WIDTH=width, **_launch(tuning, pdl)
    )


def join(
    conv: Convolution,
    header: Tensor,
    layer: Tensor,
    *,
    tuning: Tuning = JOIN,
    pdl: bool = False,
) -> None:
    """Boundary repair and join in one launch, by itself; ``scan`` does it at its end.

    Reads the moved checkpoint from PREFIX_STATE_OUT and PREFIX_HISTORY_OUT, whatever CHUNK says;
    else as ``scan``.
    """
    constants = sizes(conv, tuning)
    check_descriptor(header, layer)
    constants.pop("parts")
    join_kernel[(conv.value_heads, conv.value_dim // constants["WIDTH"])](
        conv.taps,
        _bias(conv),
        header,
        layer,
        **constants,
        TAPS=_taps(conv),
        HEIGHT=_height(conv, tuning),
        BIAS=conv.bias is not None,
        **_launch(tuning, pdl),
    )


def _bias(conv: Convolution) -> Tensor:
    """A pointer in any case; without a bias nothing reads it."""
    return conv.weight if conv.bias is None else conv.bias


def _taps(conv: Convolution) -> int:
    """Places of a tile that holds the taps of a channel."""
    return triton.next_power_of_2(conv.weight.shape[1])


def _height(conv: Convolution, tuning: Tuning) -> int:
    """Rows of a map that a join holds at once: all, where there are threads enough."""
    return conv.key_dim if tuning.warps >= 8 else min(64, conv.key_dim)


def _launch(tuning: Tuning, pdl: bool) -> dict[str, Any]:
    options = _options(tuning) | {"PDL": pdl}
    return {**options, "launch_pdl": True} if pdl else options


def _options(tuning: Tuning) -> dict[str, Any]:
    options = {"num_warps": tuning.warps}
    return options if tuning.registers is None else {**options, "maxnreg": tuning.registers}
