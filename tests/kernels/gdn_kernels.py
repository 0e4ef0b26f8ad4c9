"""Gated-delta-rule kernels without a GPU. A program: Triton interprets only if told at import."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import itertools

import pytest
import torch
from gdn_cases import Sizes, by_kernels, compare, descriptor_of, draw, ratio

from raincheck_hf.kernels import gdn, suffix_map
from raincheck_hf.kernels.gdn_twin import Lengths, Memory

torch.set_num_threads(1)
SMALL = Sizes(1, 2, 16, 16)
ODD = (Sizes(1, 3, 32, 16), Sizes(2, 2, 16, 32, bias=True), Sizes(1, 5, 16, 16, W=3))
# A map of more rows than a join of few threads holds at once.
TALL = Sizes(1, 1, 128, 16)


def check_step(device: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes = SMALL) -> None:
    """Every length of the record, and a pass without a token."""
    reach = sizes.W - 1
    for dtype in dtypes:
        for lead, record in itertools.product(range(reach + 1), (False, True)):
            for mapped in (False, True) if lead == reach else (False,):
                lengths = Lengths(0, True, record, lead, mapped)
                compare(draw(sizes, 0, lengths, lead, device), dtype)
        compare(draw(sizes, 0, Lengths(0, False, False, 1, False), 9, device), dtype)


def check_rows(device: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes = SMALL) -> None:
    """Chunks of every awkward length, in blocks of every size."""
    for dtype, (chunk, rows) in itertools.product(
        dtypes, ((1, 16), (3, 16), (7, 16), (31, 32), (33, 32), (63, 32), (75, 16), (75, 32))
    ):
        lengths = Lengths(chunk, True, True, 3, True)
        compare(draw(sizes, max(chunk, 7), lengths, chunk, device), dtype, rows=rows)


def check_record(device: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes = SMALL) -> None:
    """Every length of the record beside chunks shorter and longer than the convolution reaches."""
    reach = sizes.W - 1
    for dtype, chunk, lead, token in itertools.product(
        dtypes, (0, 2, 7), range(reach + 1), (False, True)
    ):
        for record in (False, True) if token else (False,):
            for mapped in (False, True) if lead == reach else (False,):
                lengths = Lengths(chunk, token, record, lead, mapped)
                compare(draw(sizes, 7, lengths, 10 * chunk + lead, device), dtype)


def check_sizes(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Ratios of heads and dims, another convolution, and all widths."""
    for dtype, sizes in itertools.product(dtypes, ODD):
        reach = sizes.W - 1
        for lead, mapped in ((1, False), (reach, False), (reach, True)):
            for capacity, chunk in ((0, 0), (20, 19)):
                lengths = Lengths(chunk, True, True, lead, mapped)
                compare(draw(sizes, capacity, lengths, lead, device), dtype)
    wide = Sizes(1, 2, 32, 32)
    for capacity in (0, 7):
        case = draw(wide, capacity, Lengths(capacity, True, True, 3, True), 5, device)
        found = by_kernels(case, width=16)
        for other in (by_kernels(case, width=32), by_kernels(case, early=False, stages=2)):
            for name, value in vars(found[1]).items():
                torch.testing.assert_close(
                    value, vars(other[1])[name], equal_nan=True, rtol=1e-4, atol=1e-5
                )
    for dtype in dtypes:
        compare(draw(TALL, 3, Lengths(3, True, True, 3, True), 6, device), dtype)


def check_alike(device: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes = SMALL) -> None:
    """Keys that repeat, written with full strength and kept: a power series would overflow here."""
    for dtype, rows in itertools.product(dtypes, (16, 32)):
        case = draw(sizes, 70, Lengths(70, False, False, 0, False), rows, device, alike=True)
        compare(case, dtype, rows=rows)


def check_alone(device: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes = SMALL) -> None:
    """The map step and the join as launches of their own; dtypes are the layer's."""
    generator = torch.Generator().manual_seed(3)
    phi, k = (
        torch.randn(sizes.HV, *shape, generator=generator).to(device)
        for shape in ((sizes.K, sizes.K), (sizes.K,))
    )
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(sizes.HV, device=device), torch.rand(sizes.HV, device=device)
    out = torch.full_like(phi, torch.nan)
    gdn.map_step(phi, k, g, beta, out, tuning=gdn.Tuning(16, 4))
    assert ratio(out, suffix_map.map_step(phi, k, g, beta)) < 1e-6
    for dtype, (lead, mapped) in itertools.product(dtypes, ((1, False), (3, False), (3, True))):
        case = draw(sizes, 7, Lengths(7, False, False, lead, mapped), lead, device).to(dtype)
        _, fused = by_kernels(case)
        after = Memory(**{name: value.clone() for name, value in vars(fused).items()})
        for name in ("live_state", "live_history", "lead_state"):
            getattr(after, name).fill_(torch.nan)
        gdn.join(
            case.conv, *descriptor_of(case.memory, after, case.lengths), tuning=gdn.Tuning(16, 4)
        )
        assert torch.equal(after.live_history, fused.live_history)
        for name in ("live_state", "lead_state"):
            ours, theirs = getattr(after, name), getattr(fused, name)
            if device == "cpu":
                assert torch.equal(ours, theirs), name
            else:  # two binaries: the compiler contracts products and sums in its own way
                assert ratio(ours, theirs) < 1e-6, name


def check_teeth(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """The comparison notices a join that is left out, or one with another map."""
    for dtype in dtypes:
        case = draw(SMALL, 7, Lengths(7, True, True, 3, True), 1, device)
        wrong = vars(case.memory) | {"phi": 1.001 * case.memory.phi}
        _, right = case.to(dtype).twin()
        _, other = type(case)(**(vars(case) | {"memory": Memory(**wrong)})).to(dtype).twin()
        assert ratio(other["live_state"], right["live_state"]) > 1e-4
        alone = Lengths(0, True, True, 3, True)
        _, apart = type(case)(**(vars(case) | {"lengths": alone})).to(dtype).twin()
        assert ratio(apart["live_state"], right["live_state"]) > 1e-1


def check_bad_input(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refused before anything is launched."""
    case = draw(SMALL, 7, Lengths(7, True, True, 3, True), 1, device).to(dtypes[0])
    out = case.mixed.new_empty(8, SMALL.HV * SMALL.V)
    header, layer = descriptor_of(case.memory, case.memory, case.lengths)
    workspace = gdn.Workspace.allocate(case.conv, 7)
    good = {
        "mixed": case.mixed, "a": case.a, "b": case.b, "out": out, "conv": case.conv,
        "gates": case.gates, "header": header, "layer": layer, "workspace": workspace,
    }  # fmt: skip
    narrow = good | {"tuning": gdn.Tuning(16, 4)}
    for name, value in {
        "mixed": case.mixed[:, 1:], "a": case.a.double(), "b": case.b.T, "out": out[:, ::2],
        "header": header.int(), "layer": layer[1:],
        "workspace": gdn.Workspace.allocate(
            type(case.conv)(**(vars(case.conv) | {"weight": case.conv.weight.half()})), 7
        ),
        "conv": type(case.conv)(**(vars(case.conv) | {"value_heads": 3})),
        "gates": gdn.Gates(case.gates.log_rate[1:], case.gates.time_bias),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match="must be|heads for|workspace is for"):
            gdn.prepare(**(narrow | {name: value}))
    with pytest.raises(ValueError, match="one row"):
        gdn.step(**{name: value for name, value in narrow.items() if name != "workspace"})
    with pytest.raises(ValueError, match="holds 1 to 16 rows"):
        gdn.scan(
            case.mixed.new_empty(40, 32), case.conv, header, layer, workspace,
            tuning=gdn.Tuning(16, 4),
        )  # fmt: skip
    with pytest.raises(ValueError, match="16 or 32"):
        gdn.Workspace.allocate(case.conv, 7, rows=24)
    with pytest.raises(ValueError, match="1 or more"):
        gdn.Workspace.allocate(case.conv, 0)
    for width in (8, 24):
        with pytest.raises(ValueError, match="width"):
            gdn.join(case.conv, header, layer, tuning=gdn.Tuning(width, 4))
    phi, k, g = torch.zeros(2, 32, 32), torch.zeros(2, 32), torch.zeros(2)
    with pytest.raises(ValueError, match="out must not be phi"):
        gdn.map_step(phi, k, g, g, phi)
    with pytest.raises(ValueError, match="beta must be"):
        gdn.map_step(phi, k, g, k[0], phi.clone())


if __name__ == "__main__":
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    globals()[f"check_{sys.argv[1]}"]("cpu", tuple(kinds[kind] for kind in sys.argv[2:]))
    print("agrees")
