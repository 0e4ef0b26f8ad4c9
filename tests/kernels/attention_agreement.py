"""The kernels of an attention layer against their twins, and those against float64.

Runs on a GPU, or in Triton's interpreter on a CPU (see `attention_kernels`).
"""

from __future__ import annotations

import attention_exact as exact
import pytest
import torch
from attention_inputs import ROWS, SHAPES, RandomPass, Shape, lengths_for, passes
from torch import Tensor

from raincheck_hf.kernels import attention, rope
from raincheck_hf.kernels.attention_kernels import region_attention
from raincheck_hf.kernels.attention_plan import AttentionPlan, plan_attention, scratch_size
from raincheck_hf.kernels.rope_kernels import rope_table, rotate_and_write

BOUND = 1e-5
# Small blocks of keys, fewer vectors than some passes have, splits that may have no work.
SMALL = AttentionPlan(splits=3, vectors=128, keys=32, stages=1, merge_vectors=256)


def rms_ratio(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, over that of what is expected."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def check_close(found: Tensor, twin: Tensor, precise: Tensor, what: str) -> None:
    """fp32: twin near float64, kernel near twin. Else: the kernel errs as the twin does."""
    assert not found.isnan().any(), what
    if found.dtype == torch.float32:
        assert rms_ratio(twin, precise) < BOUND, (what, "twin", rms_ratio(twin, precise))
        assert rms_ratio(found, twin) < BOUND, (what, rms_ratio(found, twin))
        return
    own = rms_ratio(twin, precise)
    assert own < (0.02 if found.dtype == torch.bfloat16 else 0.004), (what, "twin", own)
    assert rms_ratio(found, twin) <= 2 * own, (what, rms_ratio(found, twin), own)
    assert rms_ratio(found, precise) <= 2 * own, (what, rms_ratio(found, precise), own)


def check_table(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    for shape in SHAPES:
        for rows in ROWS:
            work = RandomPass(shape, rows, lengths_for(rows)[0], dtype, device)
            half = shape.half
            cos, sin = torch.full((2, rows, half), torch.nan, device=device)
            chunk = work.positions[:, :-1].contiguous() if rows > 1 else None
            rope_table(
                chunk, work.header, work.inv_freq, work.axis, 1.25, cos, sin, dtype, block_rows=4
            )
            twins = rope.rope_table(work.positions, work.inv_freq, work.axis, 1.25, dtype)
            angle = torch.tensor(
                [
                    exact.angles(work.positions[:, row].tolist(), work.inv_freq, work.axis)
                    for row in range(rows)
                ],
                dtype=torch.float64,
            )
            for found, twin, precise in zip(
                (cos, sin), twins, (angle.cos() * 1.25, angle.sin() * 1.25), strict=True
            ):
                # An fp32 angle of thousands is off by 1e-4: the models' own error, not a bound.
                assert rms_ratio(twin, precise) < (1e-3 if dtype == torch.float32 else 1e-2)
                assert rms_ratio(found, twin) < (BOUND if dtype == torch.float32 else 1e-3)
                assert torch.equal(found, found.to(dtype).float())


def check_rotation(
    shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: int
) -> None:
    """Every row count and kind of pass."""
    for rows, seed, lengths in passes(shape):
        check_one_rotation(RandomPass(shape, rows, lengths, dtype, device, seed), **sizes)


def check_one_rotation(work: RandomPass, capacity: int | None = None, **sizes: int) -> None:
    shape, lengths, dtype = work.shape, work.lengths, work.q.dtype
    cos, sin = rope.rope_table(work.positions, work.inv_freq, work.axis, 1.0, dtype)
    norm = {"offset": shape.offset, "eps": work.eps, "capacity": capacity}
    keys, values = work.keys.clone(), work.values.clone()
    work.point_at(keys, values)
    q_out = torch.full((work.rows, shape.query_heads, shape.dim), torch.nan).to(work.q)
    inputs = (work.q, work.k, work.v, work.q_weight, work.k_weight, cos, sin)
    rotate_and_write(*inputs, work.header, work.record, q_out, **norm, **sizes)

    twin_keys, twin_values = work.keys.clone(), work.values.clone()
    twin = rope.rotate_and_write(*inputs, lengths, twin_keys, twin_values, **norm)
    decodes = work.capacity if capacity is None else capacity
    used = exact.rows_in_use(decodes, min(lengths.chunk, decodes), lengths.token)
    used = [row for row in used if row < work.rows]
    precise_q = torch.zeros(twin.shape, dtype=torch.float64)
    precise_keys = work.keys.double().cpu()
    for row in used:
        slot = exact.slot_of(row, decodes, lengths.prefix, lengths.end)
        at = (shape.offset, work.eps, cos[row].cpu(), sin[row].cpu())
        for head in range(shape.query_heads):
            x = work.q[row, head].cpu()
            precise_q[row, head] = exact.turned(x, work.q_weight.cpu(), *at)
        for head in range(shape.kv_heads):
            x = work.k[row, head].cpu()
            precise_keys[head, slot] = exact.turned(x, work.k_weight.cpu(), *at)
    if used:
        check_close(q_out, twin, precise_q, f"queries of {work.rows} rows")
        slots = lengths.used(decodes)[1][: len(used)]
        check_close(keys[:, slots], twin_keys[:, slots], precise_keys[:, slots], "keys")
    unused = [row for row in range(work.rows) if row not in used]
    assert not q_out[unused].any()
    assert torch.equal(values, twin_values)
    others = [slot for slot in range(keys.shape[1]) if slot not in lengths.used(decodes)[1]]
    assert torch.equal(keys[:, others], work.keys[:, others])


def check_attention(
    shape: Shape,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    plan: AttentionPlan | None = SMALL,
) -> None:
    """Every row count and kind of pass."""
    for rows, seed, lengths in passes(shape):
        check_one_attention(RandomPass(shape, rows, lengths, dtype, device, seed), plan)


def check_default_plan(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    check_one_attention(RandomPass(SHAPES[1], 3, lengths_for(3)[1], dtype, device), None)


def check_one_attention(work: RandomPass, plan: AttentionPlan | None = SMALL) -> None:
    shape, lengths = work.shape, work.lengths
    out = attend(work, plan)
    twin = attention.region_attention(
        work.q, work.keys, work.values, lengths, work.scale, work.gate
    )
    precise = torch.zeros(work.rows, shape.query_heads, shape.dim, dtype=torch.float64)
    used = exact.rows_in_use(work.capacity, lengths.chunk, lengths.token)
    q, keys, values = work.q.cpu(), work.keys.cpu(), work.values.cpu()
    for row in used:
        slots = exact.seen_slots(row, work.capacity, lengths.prefix, lengths.answer, lengths.end)
        for head in range(shape.query_heads):
            of = head // shape.group
            found = exact.attended(q[row, head], keys[of], values[of], slots, work.scale)
            if work.gate is not None:
                found = found * torch.sigmoid(work.gate[row, head].cpu().double())
            precise[row, head] = found
    if used:
        check_close(out, twin, precise.flatten(1), f"{work.rows} rows, {lengths}, {shape}")
    unused = [row for row in range(work.rows) if row not in used]
    assert not out[unused].any()

    # What nobody sees is not even read: rubbish there, NaN too, changes nothing.
    if work.rows not in (1, 7, 33):
        return
    keys, values = work.keys.clone(), work.values.clone()
    keys[:, work.hidden_slots()] = torch.nan
    values[:, work.hidden_slots()] = torch.nan
    work.point_at(keys, values)
    assert torch.equal(attend(work, plan), out)
    work.point_at(work.keys, work.values)


def attend(
    work: RandomPass,
    plan: AttentionPlan | None,
    scratch: Tensor | None = None,
    rows: slice = slice(None),
) -> Tensor:
    """The kernels' result, into NaN, with scratch full of NaN unless it is given."""
    shape = work.shape
    q = work.q[rows]
    gate = None if work.gate is None else work.gate[rows]
    out = torch.full((len(q), shape.query_heads * shape.dim), torch.nan).to(q)
    sizes = (len(q), shape.query_heads, shape.kv_heads, shape.dim, q.element_size())
    plan = plan or plan_attention(*sizes)
    if scratch is None:
        size = scratch_size(len(q), shape.query_heads, shape.dim, plan.splits)
        scratch = torch.full((size,), torch.nan, device=q.device)
    blocks = plan.row_blocks(len(q), shape.group)
    arrivals = torch.zeros(shape.kv_heads * blocks, dtype=torch.int32, device=q.device)
    region_attention(
        q, work.header, work.record, out, scratch,
        kv_heads=shape.kv_heads, scale=work.scale, gate=gate, arrivals=arrivals, plan=plan,
    )  # fmt: skip
    assert not arrivals.any()
    return out


def check_merges(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """The last split's merge gives what the second launch gives, whatever the sizes."""
    bound = BOUND if dtype == torch.float32 else 2e-3
    for shape in SHAPES:
        for rows, splits in ((1, 1), (1, 5), (7, 2), (3, 16)):
            lengths = lengths_for(rows)[splits % 2]
            work = RandomPass(shape, rows, lengths, dtype, device)
            sizes = {"splits": splits, "vectors": 32, "keys": 32, "stages": 1}
            apart = AttentionPlan(**sizes, merge_vectors=4)
            together = AttentionPlan(**sizes, last_merges=True)
            assert rms_ratio(attend(work, together), attend(work, apart)) < bound
            check_one_attention(work, together)


def check_replay(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """A short pass after a long one: what the splits left there is not taken for theirs."""
    shape = SHAPES[1]
    long, short = lengths_for(7)[:2]
    scratch = torch.full((scratch_size(7, shape.query_heads, shape.dim, 5),), torch.nan)
    scratch = scratch.to(device)
    plan = AttentionPlan(splits=5, vectors=32, keys=32, stages=1, merge_vectors=64)
    attend(RandomPass(shape, 7, long, dtype, device), plan, scratch)
    work = RandomPass(shape, 7, short, dtype, device)
    assert torch.equal(attend(work, plan, scratch), attend(work, plan))


def check_decode_row_alone(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """The last row alone gives what it gives beside its chunk."""
    for shape in SHAPES:
        work = RandomPass(shape, 33, lengths_for(33)[0], dtype, device)
        alone = attend(work, SMALL, rows=slice(-1, None))
        assert rms_ratio(alone, attend(work, SMALL)[-1:]) < (
            BOUND if dtype == torch.float32 else 1e-2
        )


def check_prefill(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Rows of a prefill, all of a chunk, without a decode row."""
    for shape in SHAPES:
        lengths = attention.Lengths(prefix=5, chunk=19, answer=60, end=60, token=False)
        work = RandomPass(shape, 19, lengths, dtype, device)
        wide = torch.randn(19, shape.query_heads, 2 * shape.dim).to(work.q)
        work.q = wide[..., : shape.dim]
        work.k, work.v = torch.randn(2, 19, shape.kv_heads, shape.dim).to(work.q)
        check_one_rotation(work, capacity=19, block_rows=2, block_heads=2)


def check_bad_input(device: str = "cpu") -> None:
    shape = SHAPES[1]
    work = RandomPass(shape, 3, lengths_for(3)[0], device=device)
    cos, sin = rope.rope_table(work.positions, work.inv_freq, work.axis, 1.0, torch.float32)
    q_out = torch.empty(3, shape.query_heads, shape.dim, device=device)
    good = {
        "q": work.q, "k": work.k, "v": work.v, "q_weight": work.q_weight,
        "k_weight": work.k_weight, "cos": cos, "sin": sin, "header": work.header,
        "record": work.record, "q_out": q_out, "offset": 1, "eps": 1e-6,
    }  # fmt: skip
    rotate_and_write(**good)
    for name, bad in {
        "q": work.q.double(), "k": work.k[:2], "v": work.v.half(), "q_weight": work.q_weight[:8],
        "cos": cos.T, "sin": sin[:, :3], "header": work.header.int(), "record": work.record[:2],
        "q_out": q_out.transpose(0, 1), "offset": 2,
    }.items():  # fmt: skip
        with pytest.raises(ValueError):
            rotate_and_write(**{**good, name: bad})
    out = torch.empty(3, shape.query_heads * shape.dim, device=device)
    size = scratch_size(3, shape.query_heads, shape.dim, SMALL.splits)
    good = {
        "q": q_out, "header": work.header, "record": work.record, "out": out,
        "scratch": torch.empty(size, device=device), "kv_heads": shape.kv_heads, "scale": 1.0,
        "gate": work.gate, "plan": SMALL,
    }  # fmt: skip
    region_attention(**good)
    last = AttentionPlan(splits=2, vectors=16, last_merges=True)
    for name, bad in {
        "q": q_out[..., :24], "header": work.header[:9], "record": work.record.float(),
        "out": out.half(), "scratch": good["scratch"][1:], "kv_heads": 3, "gate": work.gate[:2],
        "plan": last,
    }.items():  # fmt: skip
        with pytest.raises(ValueError):
            region_attention(**{**good, name: bad})
    for sizes in (
        {"splits": 0, "vectors": 16},
        {"splits": 1, "vectors": 8},
        {"splits": 1, "vectors": 24},
    ):
        with pytest.raises(ValueError):
            AttentionPlan(**sizes)
    with pytest.raises(ValueError, match="17 query heads"):
        AttentionPlan(splits=1, vectors=16).rows(17)
