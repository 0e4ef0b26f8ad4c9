"""Training with an enabled model is stock, and what is saved knows nothing of raincheck."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_turns import ask, assert_same, model_of
from reference import random_inputs, random_model
from safetensors import safe_open

from raincheck_hf import enable_raincheck, tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "demos"))


def loss_and_gradients(model: Any, inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Of one training step on all tokens but the first."""
    model.train()
    labels = inputs["input_ids"].clone()
    labels[:, 0] = -100
    loss = model(**inputs, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(one: Any, other: Any, inputs: Any) -> None:
    loss, gradients = loss_and_gradients(one, inputs)
    other_loss, others = loss_and_gradients(other, inputs)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == others.keys()
    assert any(grad is not None and grad.abs().max() > 0 for grad in gradients.values())
    for name, grad in gradients.items():
        if grad is None:
            assert others[name] is None
        else:
            assert torch.equal(grad, others[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("asked_before", [False, True])
def test_training_an_enabled_model_is_stock_bit_for_bit(
    architecture: str, checkpointing: bool, asked_before: bool
) -> None:
    stock, enabled = (random_model(architecture, seed=5) for _ in range(2))
    inputs = random_inputs(stock, 1, "one image")
    enable_raincheck(enabled)
    if asked_before:
        ask(enabled, inputs)
    if checkpointing:
        for model in (stock, enabled):
            model.gradient_checkpointing_enable()
    assert_same_step(enabled, stock, inputs)
    # And after it, raincheck is what it was.
    enabled.zero_grad()
    assert_same(ask(enabled.eval(), inputs), ask(model_of(architecture), inputs))


def test_training_an_adapter_of_an_enabled_model_is_stock_bit_for_bit(architecture: str) -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    models = []
    for enable in (False, True):
        model = random_model(architecture, seed=5)
        if enable:
            enable_raincheck(model)
        torch.manual_seed(3)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        models.append(peft.get_peft_model(model, lora))
    assert_same_step(*models, random_inputs(models[0].get_base_model(), 1, "one image"))


# The script


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the script found, and its folder; gradient checkpointing stays on."""
    pytest.importorskip("peft", reason="the script trains a LoRA adapter with peft")
    import finetune_lora

    out = tmp_path_factory.mktemp("lora")
    options = ["--steps", "8", "--batch", "2", "--boards", "2", "--gradient-checkpointing"]
    return finetune_lora.main([*options, "--out", str(out)]), out


def test_the_loss_falls(trained: tuple[dict[str, Any], Path]) -> None:
    losses = trained[0]["losses"]
    assert len(losses) == 8
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])


def test_answers_through_the_adapter_are_those_after_merging(
    trained: tuple[dict[str, Any], Path],
) -> None:
    found = trained[0]
    for stage in ("merged", "loaded"):
        assert found[stage]["said"] == found["adapter"]["said"]
    ways = found["adapter"]["said"]
    assert all(len(answers) == 6 and any(answers) for answers in ways.values())
    assert ways["full"] != ways["hard"], "hard pruning saw as much as the full prefill"


def test_nothing_of_raincheck_is_saved(trained: tuple[dict[str, Any], Path]) -> None:
    out, original = trained[1], tiny.folder("qwen3_vl")
    config = json.loads((out / "merged" / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    shipped = json.loads((original / "config.json").read_text("utf-8"))
    # Trainer switches use_cache off and leaves that in the config of any model.
    assert config.keys() - shipped.keys() <= {"dtype", "transformers_version", "use_cache"}
    with (
        safe_open(out / "merged" / "model.safetensors", "pt") as saved,
        safe_open(original / "model.safetensors", "pt") as before,
    ):
        assert set(saved.keys()) == set(before.keys())
        assert saved.metadata() == {"format": "pt"}
    assert {path.name for path in (out / "merged").iterdir()} == {
        path.name for path in original.iterdir()
    }
    for path in [*(out / "merged").iterdir(), *(out / "adapter").iterdir()]:
        # PEFT writes down where the base model came from, which is this package's own folder.
        text = path.read_bytes().replace(str(original).encode(), b"")
        assert b"raincheck" not in text.lower(), path.name


def test_the_saved_adapter_answers_on_a_fresh_model(
    trained: tuple[dict[str, Any], Path],
) -> None:
    import finetune_lora
    import peft

    found, out = trained
    model, processor = tiny.load("qwen3_vl")
    adapted = peft.PeftModel.from_pretrained(model, out / "adapter")
    assert finetune_lora.examine(adapted, processor, 2)["said"] == found["adapter"]["said"]


def test_a_checkpoint_of_trainer_is_stock(architecture: str, tmp_path: Path) -> None:
    """`Trainer.save_model` writes the same bytes, enabled or not."""
    from transformers import Trainer, TrainingArguments

    model = random_model(architecture, seed=5)
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    written = []
    for name in ("stock", "enabled"):
        Trainer(model=model, args=arguments).save_model(str(tmp_path / name))
        files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        files.pop("training_args.bin")  # pickled anew
        written.append(files)
        ask(enable_raincheck(model), random_inputs(model, 1, "one image"))
    assert written[0] == written[1]
    assert {"config.json", "model.safetensors"} <= written[0].keys()
