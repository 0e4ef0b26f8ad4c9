"""Kernels of the gated delta rule against their twin and fp64, without a GPU and with one (O8)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raincheck_hf.kernels import gdn_twin
from raincheck_hf.kernels.gdn_twin import Lengths, Memory
from raincheck_hf.kernels.suffix_map import Convolution
from raincheck_hf.recurrent import Checkpoint, Factors, RecurrentState

PROGRAM = Path(__file__).with_name("gdn_kernels.py")


@pytest.mark.parametrize(
    "check",
    [
        "step fp32",
        "step bf16 fp16",
        "rows fp32",
        "rows bf16",
        "rows fp16",
        "record fp32",
        "sizes fp32",
        "alike fp32",
        "alike bf16",
        "alone fp32",
        "teeth fp32",
        "bad_input fp32",
    ],
)
def test_interpreted_kernels_agree_with_their_twin(check: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *check.split()],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "agrees", done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["step", "rows", "record", "sizes", "alike", "alone"])
def test_compiled_kernels_agree_with_their_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    import gdn_kernels

    getattr(gdn_kernels, f"check_{name}")("cuda", (torch.float32, torch.bfloat16, torch.float16))


def test_the_kernels_see_later_edits_of_the_weights() -> None:
    """Taps are read as words of the weights' own memory, where they fit."""
    weight = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    conv = Convolution(weight, None, 1, 16, 1, 16)
    words = conv.taps
    assert words.dtype == torch.int64 and words.shape == (48,)
    weight[5, 2] = 7.0
    assert torch.equal(conv.taps.view(torch.bfloat16).view(48, 4), weight)
    for other in (weight.float(), weight[:, :3].contiguous(), weight.flatten()[4:].view(-1, 4)):
        assert Convolution(other, None, 1, 16, 1, 16).taps is other


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("chunk", [0, 2, 5])
@pytest.mark.parametrize("token", [True, False])
def test_the_twin_does_what_the_layers_memory_does(chunk: int, token: bool) -> None:
    """Seven passes in a row, each against ``recurrent``: record, then move."""
    generator = torch.Generator().manual_seed(chunk)
    HK, HV, K, V = 1, 2, 16, 16
    channels = 2 * HK * K + HV * V
    conv = Convolution(drawn(generator, channels, 4), None, HK, K, HV, V)
    log_rate, time_bias = torch.tensor([-4.0, -3.0]), torch.tensor([0.3, -0.5])
    prefix = Checkpoint(drawn(generator, HV, K, V), drawn(generator, channels, 3))
    expected = RecurrentState.at(prefix)
    for index in range(7):
        # Without tokens in passes that restore, a suffix has to come from somewhere.
        with_token = token or index % 2 == 0
        rows = chunk if index > 0 and not (index % 2 == 0 and not token) else 0
        mixed, a, b = (drawn(generator, rows + 1, n) for n in (channels, HV, HV))
        memory, lengths = described(expected, conv, rows, with_token)
        out, written = gdn_twin.layer_pass(mixed, a, b, conv, log_rate, time_bias, memory, lengths)
        g, beta = gdn_twin.gate(a, b, log_rate, time_bias)
        if with_token:
            keys, values = conv.keys_values(expected.live.history, mixed[-1:].T)
            state = gdn_twin.suffix_map.delta_step(
                expected.live.state, keys[0], values[0], g[-1], beta[-1]
            )
            expected = expected.recorded(conv, state, Factors(mixed[-1:].T, g[-1:], beta[-1:]))
        if rows:
            moved = expected.prefix.state
            keys, values = conv.keys_values(expected.prefix.history, mixed[:rows].T)
            for row in range(rows):
                moved = gdn_twin.suffix_map.delta_step(
                    moved, keys[row], values[row], g[row], beta[row]
                )
            checkpoint = expected.prefix.advanced(moved, mixed[:rows].T)
            expected = expected.moved(conv, checkpoint)
        after, _ = described(expected, conv, rows, with_token)
        for name, value in written.items():
            kept = getattr(after, name)
            if name == "lead_inputs":
                kept = kept[:, : value.shape[1]]
            elif name in ("lead_g", "lead_beta"):
                kept = kept[: len(value)]
            torch.testing.assert_close(value, kept, msg=f"{name} in pass {index}")
        assert out[:-1][rows:].eq(0).all()


def described(
    state: RecurrentState, conv: Convolution, chunk: int, token: bool
) -> tuple[Memory, Lengths]:
    """A layer's memory as the kernels find it; NaN where there is nothing."""
    channels, reach = len(conv.weight), conv.reach
    inputs = torch.full((channels, reach), torch.nan)
    g, beta = torch.full((2, reach, conv.value_heads), torch.nan)
    lead = 0
    if state.lead is not None:
        lead = len(state.lead)
        inputs[:, :lead], g[:lead], beta[:lead] = (
            state.lead.inputs, state.lead.g, state.lead.beta,
        )  # fmt: skip
    nothing = torch.full_like(state.live.state, torch.nan)
    memory = Memory(
        prefix_state=state.prefix.state,
        prefix_history=state.prefix.history,
        live_state=state.live.state,
        live_history=state.live.history,
        lead_state=nothing if state.lead_state is None else state.lead_state,
        phi=nothing if state.phi is None else state.phi,
        lead_inputs=inputs,
        lead_g=g,
        lead_beta=beta,
    )
    return memory, Lengths(chunk, token, True, lead, state.phi is not None)
