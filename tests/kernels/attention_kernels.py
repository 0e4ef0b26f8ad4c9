"""Attention kernels on a CPU. A program: Triton interprets only if told at its import."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from functools import partial

import attention_agreement as agreement
import torch
from attention_inputs import SHAPES

torch.set_num_threads(1)

WIDE = {"block_rows": 32, "block_heads": 8}
CHECKS: dict[str, Callable[[], None]] = {
    "table": lambda: agreement.check_table(),
    "table_half": lambda: agreement.check_table(dtype=torch.float16),
    "prefill": lambda: agreement.check_prefill(),
    "attention_default_plan": lambda: agreement.check_default_plan(),
    "merges": lambda: agreement.check_merges(),
    "replay": lambda: agreement.check_replay(),
    "decode_row_alone": lambda: agreement.check_decode_row_alone(),
    "bad_input": lambda: agreement.check_bad_input(),
}
for index, shape in enumerate(SHAPES):
    CHECKS |= {
        f"rotation_{index}": partial(agreement.check_rotation, shape, **WIDE),
        f"attention_{index}": partial(agreement.check_attention, shape),
    }
# fp16: the interpreter truncates to bf16, and its tl.dot takes bf16 bits for whole numbers.
# bf16 is checked on a GPU.
CHECKS["rotation_half"] = partial(agreement.check_rotation, SHAPES[2], dtype=torch.float16, **WIDE)
CHECKS["attention_half"] = partial(agreement.check_attention, SHAPES[0], dtype=torch.float16)

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
    print("agrees")
