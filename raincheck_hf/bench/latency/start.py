"""P8: the first call of a process, with an empty kernel cache and with a filled one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

_PROGRAM = """
import sys, time
from raincheck_hf import RaincheckConfig, enable_raincheck
from raincheck_hf.bench.random_weights import build, prompt
size, device = sys.argv[1:]
model = enable_raincheck(build(size, device))
inputs = prompt(model, 16, 16)
started = time.perf_counter()
model.generate(**inputs, raincheck=RaincheckConfig(completion="blocking"), max_new_tokens=24,
               min_new_tokens=24, do_sample=False)
print("took", time.perf_counter() - started)
"""


def start(size: str, device: str) -> dict[str, Any]:
    """Seconds of the first call: kernels built and graphs captured; then built ones loaded."""
    with tempfile.TemporaryDirectory() as cache:
        first, second = (_first_call(size, device, cache) for _ in range(2))
    return {"P8_first_process_s": round(first, 2), "P8_second_process_s": round(second, 2)}


def _first_call(size: str, device: str, cache: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, size, device],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the first call failed: {done.stderr[-2000:]}")
    return float(done.stdout.rpartition("took")[2])
