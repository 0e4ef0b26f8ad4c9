"""The lean forward's own kernels equal their twins (O8), interpreted on a CPU and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("lean_kernels.py")
GROUPS = (
    "linear_1", "linear_3", "linear_7", "linear_31", "linear_33", "linear_63",
    "norms", "pointwise", "gathers", "bad_input",
)  # fmt: skip


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
    run(group, "cuda")
