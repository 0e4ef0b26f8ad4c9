"""P7: the suffix map's step and the join of one GDN layer, captured."""

from __future__ import annotations

from typing import Any

import torch

from raincheck_hf.bench.latency.calls import captured, spread

# Qwen3.5-9B: key heads, value heads, key and value width, convolution width.
_HK, _HV, _DIM, _W = 16, 32, 128, 4
_LAYERS = 8  # in turn, so that each finds its state in memory as it does between other layers
_ROUNDS = 6  # a graph, so that little of its launch falls to one layer


def recurrent_layer(size: str, device: str) -> dict[str, Any]:
    """µs of one layer's map step and of its join with boundary repair, on Qwen3.5-9B's sizes."""
    if not device.startswith("cuda"):
        return {"skipped": "needs a GPU"}
    from raincheck_hf.kernels import descriptor as d
    from raincheck_hf.kernels import gdn
    from raincheck_hf.kernels.suffix_map import Convolution, map_step

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    keys = torch.nn.functional.normalize(draw(_HV, _DIM), dim=-1)
    g, beta = -draw(_HV).abs() / 10, torch.rand(_HV, device=device)
    maps = [draw(_HV, _DIM, _DIM) for _ in range(_LAYERS)]
    outs = [torch.empty_like(phi) for phi in maps]
    gdn.map_step(maps[0], keys, g, beta, outs[0])
    apart = float((outs[0] - map_step(maps[0], keys, g, beta)).abs().max())

    channels = (2 * _HK + _HV) * _DIM
    conv = Convolution(draw(channels, _W, dtype=torch.bfloat16), None, _HK, _DIM, _HV, _DIM)
    header = torch.zeros(d.HEADER.value, dtype=torch.int64, device=device)
    header[d.CHUNK.value], header[d.LEAD.value], header[d.MAPPED.value] = 31, _W - 1, 1
    held: list[torch.Tensor] = []
    records = []
    for _ in range(_LAYERS):
        record = torch.zeros(d.RECORD_SIZE.value, dtype=torch.int64)
        states = (
            d.PREFIX_STATE_OUT, d.LIVE_STATE_IN, d.LIVE_STATE_OUT, d.LEAD_STATE_IN,
            d.LEAD_STATE_OUT, d.PHI_IN,
        )  # fmt: skip
        parts = {entry: draw(_HV, _DIM, _DIM) for entry in states}
        histories = (
            d.PREFIX_HISTORY_OUT, d.LIVE_HISTORY_IN, d.LIVE_HISTORY_OUT, d.LEAD_INPUTS_IN,
        )  # fmt: skip
        parts |= {e: draw(channels, _W - 1, dtype=torch.bfloat16) for e in histories}
        parts |= {e: -draw(_W - 1, _HV).abs() / 10 for e in (d.LEAD_G_IN, d.LEAD_BETA_IN)}
        for entry, tensor in parts.items():
            record[entry.value] = tensor.data_ptr()
        held += parts.values()
        records.append(record.to(device))

    def all_maps() -> None:
        for phi, out in zip(maps * _ROUNDS, outs * _ROUNDS, strict=True):
            gdn.map_step(phi, keys, g, beta, out)

    def all_joins() -> None:
        for record in records * _ROUNDS:
            gdn.join(conv, header, record)

    calls = _LAYERS * _ROUNDS
    per_map = [spent / calls for spent in captured(all_maps)]
    per_join = [spent / calls for spent in captured(all_joins)]
    return {
        "map_step_difference": apart,
        "P7_map_step_us": spread(per_map),
        "P7_join_us": spread(per_join),
    }
