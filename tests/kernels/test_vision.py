"""The vision tower's kernels equal their twins (O8), interpreted on a CPU and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raincheck_hf.kernels.segments import block_table, split_width

PROGRAM = Path(__file__).with_name("vision_kernels.py")
GROUPS = ("attention", "attention_far", "attention_apart", "norms", "rope", "bad_input")


def run(group: str, *device: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), group, *device],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "agrees", done.stderr[-3000:]


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted_kernels_equal_their_twins(group: str) -> None:
    pytest.importorskip("triton")
    run(group)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("group", GROUPS)
def test_compiled_kernels_equal_their_twins(group: str) -> None:
    if group.startswith("attention") and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("vision attention copies tiles by descriptor: made for Hopper")
    run(group, "cuda")


def test_blocks_stay_within_their_segments() -> None:
    table = block_table([5, 2, 4], 4, torch.device("cpu"))
    assert table.tolist() == [[0, 0, 5], [4, 0, 5], [5, 5, 7], [7, 7, 11]]
    assert table.dtype == torch.int32
    assert block_table([], 4, torch.device("cpu")).shape == (0, 3)


@pytest.mark.parametrize(
    ("width", "parts"),
    [(72, (64, 16)), (64, (64, 0)), (16, (16, 0)), (40, (32, 16)), (120, (64, 64)), (8, (16, 0)),
     (88, (64, 32))],
)  # fmt: skip
def test_two_powers_of_two_cover_a_width(width: int, parts: tuple[int, int]) -> None:
    assert split_width(width) == parts
    assert sum(parts) >= width
