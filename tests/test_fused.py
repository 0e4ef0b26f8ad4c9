"""Executor `fused`: where it runs, why not elsewhere, and that it computes what `modules` does."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import enabled_model
from reference import random_inputs, random_model
from torch import nn

from raincheck_hf import RaincheckConfig, enable_raincheck, executor
from raincheck_hf.executor import choose_executor
from raincheck_hf.executor.plain import Census, unplain
from raincheck_hf.recurrent import Checkpoint, RecurrentState

PROGRAM = Path(__file__).with_name("fused_passes.py")


def test_interpreted_passes_equal_those_of_the_models_own_layers(architecture: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), architecture],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "agrees", done.stderr[-3000:]


def test_on_a_cpu_fused_is_refused_and_auto_says_once_why_it_is_not(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = enable_raincheck(random_model(architecture, seed=5))
    inputs = random_inputs(model, 1, "one image")
    with pytest.raises(ValueError, match="'fused' cannot run this model: the weights are on cpu"):
        model.generate(**inputs, raincheck=RaincheckConfig(executor="fused"), max_new_tokens=2)
    with caplog.at_level(logging.INFO, logger="raincheck_hf"):
        for _ in range(2):
            out = model.generate(
                **inputs, raincheck=True, max_new_tokens=2, return_dict_in_generate=True
            )
            assert out.raincheck.executor == "modules"
    lines = [record.message for record in caplog.records if "executor" in record.message]
    assert lines == ["raincheck runs on executor 'modules': the weights are on cpu, not on a CUDA "
                     "device"]  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels were interpreted, so that a CPU's model is looked at; nothing runs."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


class Adapted(nn.Linear):
    """What an adapter library puts in a linear layer's place."""


def first_layer(model: Any) -> Any:
    return model.model.language_model.layers[0]


def adapted(model: Any) -> None:
    old = first_layer(model).mlp.up_proj
    first_layer(model).mlp.up_proj = Adapted(old.in_features, old.out_features, bias=False)


def adapted_head(model: Any) -> None:
    model.lm_head = Adapted(model.lm_head.in_features, model.lm_head.out_features, bias=False)


def hooked(model: Any) -> None:
    first_layer(model).register_forward_hook(lambda *_: None)


def wrapped(model: Any) -> None:
    layer = first_layer(model)
    layer.forward = layer.forward


def biased(model: Any) -> None:
    first_layer(model).mlp.up_proj.bias = nn.Parameter(torch.zeros(1))


def other_dtype(model: Any) -> None:
    first_layer(model).mlp.up_proj.double()


def strided(model: Any) -> None:
    part = first_layer(model).mlp.up_proj
    part.weight = nn.Parameter(part.weight.detach().T.contiguous().T)


def quantised(model: Any) -> None:
    class Packed(nn.Parameter):
        pass

    part = first_layer(model).mlp.up_proj
    part.weight = Packed(part.weight.detach())


def other_activation(model: Any) -> None:
    first_layer(model).mlp.act_fn = nn.GELU()


REASONS = {
    adapted: r"mlp\.up_proj is a Adapted, not a plain linear layer",
    adapted_head: "lm_head is a Adapted, not a plain linear layer",
    hooked: r"layers\.0 has forward hooks",
    wrapped: r"layers\.0 has a forward of its own",
    biased: r"mlp\.up_proj has a bias",
    other_dtype: "linear weights are torch.float32, torch.float64",
    strided: r"mlp\.up_proj\.weight is not contiguous",
    quantised: r"mlp\.up_proj\.weight is a Packed",
    other_activation: "act_fn is a GELU, not SiLU",
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_what_the_lean_forward_would_get_wrong_is_refused(change: Any) -> None:
    model = enable_raincheck(random_model("qwen3_vl", seed=5))
    assert choose_executor("fused", model).name == "fused"
    change(model)
    with pytest.raises(ValueError, match=REASONS[change]):
        choose_executor("fused", model)
    assert choose_executor("auto", model).name == "modules"


@pytest.mark.usefixtures("interpreted")
def test_other_architectures_are_refused() -> None:
    model = enable_raincheck(random_model("qwen3_vl_moe", seed=5))
    with pytest.raises(ValueError, match="has no fused kernels"):
        choose_executor("fused", model)


@pytest.mark.usefixtures("interpreted")
def test_auto_leaves_fp32_to_the_models_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_raincheck(random_model("qwen3_vl", seed=5))
    from raincheck_hf.executor.plan import why_not

    assert why_not(model, demanded=True) is None
    assert "torch.float32" in str(why_not(model, demanded=False))
    assert why_not(model.bfloat16(), demanded=False) is None


@pytest.mark.usefixtures("interpreted")
def test_the_executor_is_kept_until_a_weight_is_replaced(architecture: str) -> None:
    model = enable_raincheck(random_model(architecture, seed=5))
    first = choose_executor("fused", model)
    assert choose_executor("fused", model) is first
    part = first_layer(model).mlp.up_proj
    with torch.no_grad():
        part.weight.mul_(2)  # in place: the kernels read it where it lies
    assert choose_executor("fused", model) is first
    assert first.plan.layers[0].up.data_ptr() == part.weight.data_ptr()
    part.weight = nn.Parameter(part.weight.detach().clone())
    second = choose_executor("fused", model)
    assert second is not first
    assert second.plan.layers[0].up.data_ptr() == part.weight.data_ptr()


def test_a_census_notices_whatever_was_replaced() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))

    def replace_module(root: Any) -> None:
        root[1][0] = nn.Linear(2, 2)

    def replace_data(root: Any) -> None:
        root[0].weight.data = root[0].weight.data.clone()

    def hook(root: Any) -> None:
        root[1].register_forward_pre_hook(lambda *_: None)

    def wrap(root: Any) -> None:
        root[1].forward = root[1].forward

    for change in (replace_module, replace_data, hook, wrap):
        root = build()
        census = Census(root)
        assert census.holds()
        change(root)
        assert not census.holds()
    assert next(unplain(build(), "it", (nn.Linear,)), None) is None


def test_a_cpu_needs_no_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"  # as where it is not installed
        "sys.path.insert(0, 'tests')\n"
        "from harness import enabled_model, run_turn\n"
        "from reference import random_inputs\n"
        "from raincheck_hf import RaincheckConfig\n"
        "model = enabled_model('qwen3_5')\n"
        "out = run_turn(model, random_inputs(model, 1, 'one image'), RaincheckConfig(), 3)\n"
        "print(out.raincheck.executor)\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.stdout.strip() == "modules", done.stderr[-2000:]


def test_choosing_on_a_cpu_imports_no_kernel(architecture: str) -> None:
    assert choose_executor("auto", enabled_model(architecture)) is executor._MODULES


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copied_states_forget_where_the_others_lay(copied: Any) -> None:
    pytest.importorskip("triton")
    from raincheck_hf.executor.states import LayerStates

    states = LayerStates({3: RecurrentState.at(Checkpoint(torch.ones(2), torch.ones(1)))}, [[7]])
    twin = copied(states)
    assert type(twin) is dict
    assert torch.equal(twin[3].live.state, torch.ones(2))
