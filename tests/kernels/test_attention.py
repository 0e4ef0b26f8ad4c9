"""Attention kernels, their twins, and the models' own layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_inputs import SHAPES, RandomPass, lengths_for
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from raincheck_hf.executor.modules import visible_slots
from raincheck_hf.kernels import rope
from raincheck_hf.kernels.attention import Lengths, region_attention
from raincheck_hf.kernels.attention_plan import plan_attention
from raincheck_hf.regions import Regions

PROGRAM = Path(__file__).with_name("attention_kernels.py")
INTERPRETED = [
    ["attention_0", "rotation_0"],
    ["attention_1"],
    ["rotation_1"],
    ["attention_2", "rotation_2"],
    ["attention_half", "rotation_half"],
    ["merges"],
    ["replay", "decode_row_alone", "attention_default_plan"],
    ["table", "table_half", "prefill", "bad_input"],
]


@pytest.mark.parametrize("checks", INTERPRETED, ids=" ".join)
def test_interpreted_kernels_agree_with_their_twins(checks: list[str]) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *checks],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "agrees", done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_kernels_agree_with_their_twins(dtype: torch.dtype) -> None:
    import attention_agreement as agreement

    agreement.check_table("cuda", dtype)
    for shape in SHAPES:
        agreement.check_rotation(shape, "cuda", dtype)
        agreement.check_attention(shape, "cuda", dtype)
    agreement.check_default_plan("cuda", dtype)
    agreement.check_prefill("cuda", dtype)
    agreement.check_merges("cuda", dtype)
    agreement.check_replay("cuda", dtype)
    agreement.check_decode_row_alone("cuda", dtype)
    agreement.check_bad_input("cuda")


@pytest.mark.parametrize("restored", [0, 6])
def test_what_the_twin_sees_is_what_the_modules_executor_sees(restored: int) -> None:
    regions = Regions(past=5, initial=7, deferred=11, restored=restored, answer=3)
    groups = (regions.chunk_group(4), regions.decode_group())
    lengths = Lengths(regions.prefix, 4, regions.answer_start, regions.end, token=True)
    expected = visible_slots(groups, torch.device("cpu"))
    assert expected is not None
    found = lengths.visible(4, expected.shape[1])
    assert torch.equal(found, expected)


def test_the_twin_mixes_values_by_softmax() -> None:
    work = RandomPass(SHAPES[0], 7, lengths_for(7)[0])
    seen = work.lengths.visible(6, work.keys.shape[1])
    expected = torch.nn.functional.scaled_dot_product_attention(
        work.q.transpose(0, 1), work.keys, work.values, attn_mask=seen, scale=work.scale
    )
    found = region_attention(work.q, work.keys, work.values, work.lengths, work.scale)
    torch.testing.assert_close(found, expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_twin_rotates_bit_for_bit_as_the_models_do(offset: int, dtype: torch.dtype) -> None:
    lengths = Lengths(prefix=3, chunk=6, answer=20, end=22, token=True)
    work = RandomPass(SHAPES[1], 7, lengths, dtype)
    module = qwen3_5 if offset else qwen3_vl
    norms = qwen3_5.Qwen3_5RMSNorm, qwen3_vl.Qwen3VLTextRMSNorm
    turned = []
    cos, sin = rope.rope_table(work.positions, work.inv_freq, work.axis, 1.0, dtype)
    if not offset:  # this one turns whole heads
        work.inv_freq, work.axis = work.inv_freq.repeat(4), work.axis.repeat(4)
        cos, sin = rope.rope_table(work.positions, work.inv_freq, work.axis, 1.0, dtype)
    for x, weight in ((work.q, work.q_weight), (work.k, work.k_weight)):
        norm = norms[1 - offset](x.shape[-1], eps=work.eps).to(dtype)
        norm.weight.data = weight
        turned.append(norm(x).detach().transpose(0, 1)[None])
    both = [torch.cat([part, part], -1)[None].to(dtype) for part in (cos, sin)]
    q, k = module.apply_rotary_pos_emb(*turned, *both)
    keys, values = work.keys.clone(), work.values.clone()
    found = rope.rotate_and_write(
        work.q, work.k, work.v, work.q_weight, work.k_weight, cos, sin, lengths, keys, values,
        offset=offset, eps=work.eps,
    )  # fmt: skip
    slots = [3, 4, 5, 6, 7, 8, 22]
    assert torch.equal(found, q[0].transpose(0, 1))
    assert torch.equal(keys[:, slots], k[0])
    assert torch.equal(values[:, slots], work.v.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_makes_the_models_table(dtype: torch.dtype) -> None:
    config = qwen3_vl.Qwen3VLTextConfig(
        hidden_size=64,
        num_attention_heads=1,
        head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    )
    rotary = qwen3_vl.Qwen3VLTextRotaryEmbedding(config)
    positions = torch.randint(0, 4000, (3, 9))
    axis = torch.zeros(32, dtype=torch.int32)
    axis[1:30:3], axis[2:30:3] = 1, 2
    found = rope.rope_table(positions, rotary.inv_freq, axis, rotary.attention_scaling, dtype)
    expected = rotary(torch.zeros(1, dtype=dtype), positions[:, None])
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.to(dtype), theirs[0, :, :32])


def test_a_plan_fills_the_processors_once_and_fits_any_group() -> None:
    for heads, kv_heads, dim in ((32, 8, 128), (16, 4, 256), (4, 2, 64), (7, 1, 16), (71, 1, 64)):
        for itemsize in (2, 4):
            for rows in (1, 8, 32, 512):
                plan = plan_attention(rows, heads, kv_heads, dim, itemsize)
                group = heads // kv_heads
                blocks = plan.row_blocks(rows, group)
                assert plan.rows(group) * blocks >= rows
                programs = plan.splits * kv_heads * blocks
                assert programs <= 132 or plan.splits == 1
                assert 2 * programs > 132 or plan.splits == 1
