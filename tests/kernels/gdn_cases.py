"""Passes of one gated-delta-rule layer: by the kernels, by their twin, and by the twin in fp64.

Memory that a pass must not read, and memory that it must write or leave alone, holds NaN before.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from raincheck_hf.kernels import descriptor, gdn, gdn_twin
from raincheck_hf.kernels.gdn_twin import Lengths, Memory
from raincheck_hf.kernels.suffix_map import Convolution


@dataclass(frozen=True)
class Sizes:
    """Key heads, value heads, their dims, the convolution's width, and whether it has a bias."""

    HK: int
    HV: int
    K: int
    V: int
    W: int = 4
    bias: bool = False


@dataclass(frozen=True)
class Case:
    """One pass: rows [capacity + 1, ...] of which some are used, parameters and memory."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    conv: Convolution
    gates: gdn.Gates
    memory: Memory
    lengths: Lengths

    def to(self, dtype: torch.dtype) -> Case:
        """All numbers in one dtype; states, maps and factors in fp32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        conv = replace(
            self.conv,
            weight=self.conv.weight.to(dtype),
            bias=None if self.conv.bias is None else self.conv.bias.to(dtype),
        )
        inputs = {"prefix_history", "live_history", "lead_inputs"}
        memory = {
            field.name: getattr(self.memory, field.name).to(dtype if field.name in inputs else wide)
            for field in fields(Memory)
        }
        gates = gdn.Gates(self.gates.log_rate.to(wide), self.gates.time_bias.to(dtype))
        rows = (x.to(dtype) for x in (self.mixed, self.a, self.b))
        return Case(*rows, conv, gates, Memory(**memory), self.lengths)

    def twin(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The pass in plain PyTorch."""
        gates = self.gates
        return gdn_twin.layer_pass(
            self.mixed, self.a, self.b, self.conv, gates.log_rate, gates.time_bias,
            self.memory, self.lengths,
        )  # fmt: skip


def draw(
    sizes: Sizes, capacity: int, lengths: Lengths, seed: int, device: str, alike: bool = False
) -> Case:
    """A case in fp32, with numbers that bf16 can hold.

    Args:
        sizes: Of the layer.
        capacity: Chunk rows.
        lengths: Rows in use, tokens recorded.
        seed: For every number.
        device: Where to put it.
        alike: All chunk rows the same, written with full strength and no decay to speak of: the
            hardest system that a chunk can pose.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float().to(device)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        values = low + (high - low) * torch.rand(shape, generator=generator)
        return values.bfloat16().float().to(device)

    HK, HV, K, V, reach = sizes.HK, sizes.HV, sizes.K, sizes.V, sizes.W - 1
    channels = 2 * HK * K + HV * V
    # As in a grouped projection, a row is followed by other columns.
    mixed, a, b = normal(capacity + 1, channels + 16), normal(capacity + 1, HV + 3), None
    b = normal(capacity + 1, HV + 5)
    # Long memory: with the decays of an untrained layer no map and no checkpoint would matter.
    log_rate = uniform(-6.0, -2.5, HV)
    if alike:
        mixed[:], b[:], log_rate[:] = mixed[0].clone(), 12.0, -20.0
    for rows in (mixed, a, b):
        rows[lengths.chunk : capacity] = torch.nan
        if not lengths.token:
            rows[capacity] = torch.nan
    lead_inputs = normal(channels, reach)
    lead_inputs[:, lengths.lead :] = torch.nan
    lead_g, lead_beta = uniform(-0.2, 0.0, reach, HV), uniform(0.1, 0.9, reach, HV)
    lead_g[lengths.lead :], lead_beta[lengths.lead :] = torch.nan, torch.nan
    phi = 0.6 * torch.eye(K, device=device) + 0.4 * normal(HV, K, K) / K**0.5
    lead_state = normal(HV, K, V)
    if not lengths.mapped:
        phi[:] = torch.nan
        if lengths.lead < reach:
            lead_state[:] = torch.nan
    conv = Convolution(
        uniform(-0.8, 0.8, channels, sizes.W),
        normal(channels) if sizes.bias else None,
        HK,
        K,
        HV,
        V,
    )
    memory = Memory(
        prefix_state=normal(HV, K, V),
        prefix_history=normal(channels, reach),
        live_state=normal(HV, K, V),
        live_history=normal(channels, reach),
        lead_state=lead_state,
        phi=phi,
        lead_inputs=lead_inputs,
        lead_g=lead_g,
        lead_beta=lead_beta,
    )
    gates = gdn.Gates(log_rate, uniform(-1.0, 1.0, HV))
    return Case(mixed[:, :channels], a[:, :HV], b[:, :HV], conv, gates, memory, lengths)


def descriptor_of(memory: Memory, after: Memory, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Header and record of a pass from one memory to another."""
    device = memory.phi.device
    header = torch.zeros(descriptor.HEADER.value, dtype=torch.int64)
    for name, value in (
        ("CHUNK", lengths.chunk), ("TOKEN", lengths.token), ("RECORD", lengths.record),
        ("LEAD", lengths.lead), ("MAPPED", lengths.mapped),
    ):  # fmt: skip
        header[getattr(descriptor, name).value] = int(value)
    layer = torch.zeros(descriptor.RECORD_SIZE.value, dtype=torch.int64)
    for field in fields(Memory):
        for place, side in (("IN", memory), ("OUT", after)):
            entry = getattr(descriptor, f"{field.name.upper()}_{place}").value
            layer[entry] = getattr(side, field.name).data_ptr()
    return header.to(device), layer.to(device)


def by_kernels(
    case: Case,
    rows: int | None = None,
    width: int = 16,
    pdl: bool = False,
    early: bool = True,
    stages: int = 1,
) -> tuple[Tensor, Memory]:
    """The pass by the kernels: outputs, and the memory behind it with NaN where nothing wrote."""
    after = Memory(
        **{
            field.name: torch.full_like(getattr(case.memory, field.name).contiguous(), torch.nan)
            for field in fields(Memory)
        }
    )
    header, layer = descriptor_of(case.memory, after, case.lengths)
    columns = case.conv.value_heads * case.conv.value_dim
    backing = case.mixed.new_full((len(case.mixed), columns + 16), torch.nan)
    out, capacity = backing[:, :columns], len(case.mixed) - 1
    given = (case.mixed, case.a, case.b, out, case.conv, case.gates, header, layer)
    if capacity == 0:
        gdn.step(*given, tuning=gdn.Tuning(width, 4), pdl=pdl)
    else:
        workspace = gdn.Workspace.allocate(case.conv, capacity, rows)
        for value in vars(workspace).values():
            if isinstance(value, Tensor):
                value.fill_(torch.nan)
        gdn.prepare(*given, workspace, tuning=gdn.Tuning(4 * width, 8, early=early), pdl=pdl)
        tuning = gdn.Tuning(width, 4, stages, early=early)
        gdn.scan(out, case.conv, header, layer, workspace, tuning=tuning, pdl=pdl)
    assert backing[:, columns:].isnan().all(), "a row was written beyond its end"
    return out, after


def ratio(found: Tensor, true: Tensor) -> float:
    """RMS of the error over RMS of the truth."""
    found, true = found.double(), true.double()
    return float((found - true).square().mean().sqrt() / true.square().mean().sqrt())


def compare(case: Case, dtype: torch.dtype, **options: object) -> dict[str, float]:
    """Hold the kernels' pass against the twin's, and both against fp64.

    Returns:
        The RMS ratio between kernel and truth of each result.
    """
    low, true = case.to(dtype), case.to(torch.float64)
    out, after = by_kernels(low, **options)  # type: ignore[arg-type]
    twin_out, twin_written = low.twin()
    true_out, true_written = true.twin()
    chunk, capacity = case.lengths.chunk, len(case.mixed) - 1
    used = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    used[:chunk] = True
    used[capacity] = case.lengths.token
    assert not out[~used].any(), "unused rows must be zero"
    results = {}
    if chunk:
        results["chunk rows"] = (out[:chunk], twin_out[:chunk], true_out[:chunk])
    if case.lengths.token:
        results["decode row"] = (out[capacity], twin_out[capacity], true_out[capacity])
    for field in fields(Memory):
        name, found = field.name, getattr(after, field.name)
        if name not in twin_written:
            assert found.isnan().all(), f"{name} must be left alone"
            continue
        twin, exact = twin_written[name], true_written[name]
        if name == "lead_inputs":
            kept = twin.shape[1]
            assert found[:, kept:].isnan().all(), "columns behind the lead must be left alone"
            found = found[:, :kept]
        elif name.startswith("lead_") and name != "lead_state":
            assert found[len(twin) :].isnan().all(), "rows behind the lead must be left alone"
            found = found[: len(twin)]
        if name.endswith(("history", "inputs")):
            assert torch.equal(found, twin), f"{name} must be copied exactly"
        else:
            results[name] = (found, twin, exact)
    ratios = {}
    for name, (found, twin, exact) in results.items():
        own = ratio(twin, exact)
        ratios[name] = ratio(found, exact)
        if dtype == torch.float32:
            assert own < 1e-5, f"{name}: the twin is off by {own:.1e}"
            assert ratio(found, twin) < 1e-5, f"{name}: off by {ratio(found, twin):.1e}"
        else:
            limit = max(2 * own, 1e-5)
            assert ratios[name] <= limit, f"{name}: off by {ratios[name]:.1e}, twin by {own:.1e}"
    return ratios
