"""Two turns on executor `fused` against `modules`, kernels interpreted. A program: see below.

Triton interprets only if told at its import, so this runs by itself:
``python fused_passes.py ARCHITECTURE``.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any
from unittest import mock

import torch
from harness import answer_of, distance, enabled_model, logits_of, run_turn
from reference import next_turn, random_inputs

from raincheck_hf import RaincheckConfig
from raincheck_hf.executor import captured
from raincheck_hf.executor.fused import known_executor

torch.set_num_threads(1)


def main(architecture: str) -> None:
    model = enabled_model(architecture)
    inputs = random_inputs(model, 1, "one image")
    again = random_inputs(model, 11, "text only")

    def two_turns(executor: str) -> list[torch.Tensor]:
        # A plain pass, one with a whole chunk, one with a part of it, and a chunk by itself; in
        # the first turn all passes of many rows are launched, in the second one none is.
        config = RaincheckConfig(
            selector="random", chunk_size=3, guard_tokens=1, completion="blocking",
            completion_chunk_size=4, executor=executor, retention=0.4,
        )  # fmt: skip
        with mock.patch.object(captured, "_MOST_ROWS", 0):
            one = run_turn(model, inputs, config, 4)
        assert one.raincheck.executor == executor
        assert one.raincheck.restored_in_answer > 3
        whole = next_turn(inputs, answer_of(one, inputs), again)
        two = run_turn(model, whole, config, 2, cache=one.cache)
        return [logits_of(one), logits_of(two)]

    serial = RaincheckConfig(
        selector="random", chunk_size=3, guard_tokens=0, fuse=False, completion="lazy",
        executor="fused",
    )  # fmt: skip
    with torch.inference_mode():  # what is made here is written again outside
        apart = run_turn(model, inputs, serial, 2)
    assert list(kept(model)) == [64]
    assert apart.raincheck.restored_per_step == [3]
    together = run_turn(model, inputs, serial.replace(executor="modules"), 2)
    assert distance(logits_of(apart), logits_of(together)) < 1e-4
    state, same = (out.cache.conversation.recurrent for out in (apart, together))
    for layer in state:
        assert distance(state[layer].live.state, same[layer].live.state) < 1e-4

    before = kept(model)[64].descriptor.header.clone()
    for ours, theirs in zip(two_turns("fused"), two_turns("modules"), strict=True):
        assert distance(ours, theirs) < 1e-4, distance(ours, theirs)
    assert not torch.equal(kept(model)[64].descriptor.header, before)  # the second turn ran on it


def kept(model: Any) -> Any:
    """The prefills of a model that can be captured, by rows."""
    executor = known_executor(model)
    assert executor is not None
    return executor._prefills._sizes


if __name__ == "__main__":
    main(sys.argv[1])
    print("agrees")
