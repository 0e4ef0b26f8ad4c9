"""The lean vision tower computes what the model's own does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("lean_tower.py")


@pytest.mark.parametrize("attention", ["torch", "kernel"])
def test_interpreted_tower_equals_the_models_own(attention: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), attention],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "agrees", done.stderr[-3000:]
