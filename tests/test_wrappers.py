"""What people put around a model works on executor `modules`, or is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from helpers_turns import (
    LAZY,
    answer_of,
    ask,
    assert_close,
    assert_same,
    logits_of,
    model_of,
)
from helpers_wrappers import BLOCKING, assert_alike, two_turns, with_lora
from reference import random_inputs, random_model
from torch import nn

from raincheck_hf import (
    RaincheckConfig,
    RaincheckSession,
    enable_raincheck,
    tiny,
)
from raincheck_hf.bench import data_parallel
from raincheck_hf.bench.random_weights import build
from raincheck_hf.bench.wrappers import WAYS, converse, split
from raincheck_hf.models import adapter_for
from raincheck_hf.turnstile import turnstile


@pytest.fixture
def stock(architecture: str) -> Any:
    """A model of its own, never enabled."""
    return random_model(architecture, seed=5)


@pytest.fixture
def inputs(stock: Any) -> Any:
    return random_inputs(stock, 1, "one image")


# Executor `fused`, which reads plain weights


def replace_by_lora(model: Any) -> None:
    with_lora(model)


def replace_weights(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="the weights need torchao")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def replace_by_compiled(model: Any) -> None:
    compile_parts(model)


def add_hooks(model: Any) -> None:
    cpu_offload(model, torch.device("cpu"))


@pytest.mark.parametrize(
    "change", [replace_by_lora, replace_weights, replace_by_compiled, add_hooks]
)
def test_fused_refuses_what_has_no_plain_weights(
    stock: Any, inputs: Any, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name, on a CPU: Triton's interpreter stands in for a GPU."""
    pytest.importorskip("triton", reason="fused needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    enable_raincheck(stock)
    change(stock)
    with pytest.raises(ValueError, match="executor 'fused' cannot run this model.*'modules'"):
        ask(stock, inputs, {**LAZY, "executor": "fused"})
    assert ask(stock, inputs).raincheck.executor == "modules"


# torch.compile


def compile_wrapper(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compile_model(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def compile_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compile_layers(model: Any) -> Any:
    for layer in model.model.language_model.layers:
        layer.compile(backend="eager")
    return model


def compile_parts(model: Any) -> Any:
    """Submodules replaced by their compiled selves, inductor's place taken by aot_eager."""
    for layer in model.model.language_model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="aot_eager")
    model.lm_head = torch.compile(model.lm_head, backend="aot_eager")
    return model


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(
    ("compiled", "enable_first"),
    [
        (compile_wrapper, False),
        (compile_model, False),
        (compile_model, True),
        (compile_forward, False),
        (compile_forward, True),
        (compile_layers, False),
        (compile_parts, True),
    ],
)
def test_a_compiled_model_answers_alike(
    architecture: str, stock: Any, inputs: Any, compiled: Callable[[Any], Any], enable_first: bool
) -> None:
    model = compiled(enable_raincheck(stock) if enable_first else stock)
    model = enable_raincheck(model)
    assert_alike(two_turns(model, inputs), two_turns(model_of(architecture), inputs))


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_vision_tower_shows_selectors_the_same(
    architecture: str, stock: Any, inputs: Any
) -> None:
    """It was compiled, and run, before the hooks were there that a selector's context needs."""
    for block in stock.model.visual.blocks:
        block.compile(backend="eager")
    stock.generate(**inputs, max_new_tokens=1)
    enable_raincheck(stock)
    for selector in ("mmtok", "saliency"):
        config = {**LAZY, "selector": selector}
        out, wanted = ask(stock, inputs, config), ask(model_of(architecture), inputs, config)
        assert torch.equal(out.raincheck.selected, wanted.raincheck.selected)
        assert_close(logits_of(out), logits_of(wanted))


# accelerate


def test_weights_on_disk(architecture: str, stock: Any, inputs: Any, tmp_path: Any) -> None:
    disk_offload(stock, tmp_path, execution_device=torch.device("cpu"))
    assert_alike(two_turns(enable_raincheck(stock), inputs),
                 two_turns(model_of(architecture), inputs), atol=0)  # fmt: skip


@pytest.mark.parametrize("completion", ["background", "lazy"])
def test_a_device_map(
    architecture: str, stock: Any, inputs: Any, tmp_path: Any, completion: str
) -> None:
    """The first layers stay, the others come from the disk when they run."""
    enable_raincheck(stock)
    dispatch_model(stock, split(stock, "cpu"), offload_dir=tmp_path, force_hooks=True)
    assert {p.device.type for p in stock.parameters()} == {"cpu", "meta"}
    config = {**LAZY, "completion": completion}
    out = two_turns(stock, inputs, config)
    assert_alike(out, two_turns(model_of(architecture), inputs), atol=0)


def test_the_embedding_is_asked_by_one_thread_at_a_time(
    architecture: str, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hook takes the table away after each call; another thread must not be in between."""
    enable_raincheck(stock)
    adapter = type(adapter_for(stock))
    plain, held = adapter.embed, []

    def embed(self: Any, model: Any, ids: Any) -> Any:
        held.append(turnstile(model)._held)
        return plain(self, model, ids)

    monkeypatch.setattr(adapter, "embed", embed)
    two_turns(stock, random_inputs(stock, 1, "one image"), LAZY)
    assert held and all(held)


def test_threads_share_an_offloaded_model(architecture: str, stock: Any, tmp_path: Any) -> None:
    """Hooks bring weights in and take them away; passes of one model must not meet."""
    cases = [random_inputs(stock, seed, "one image") for seed in (1, 2, 3)]
    disk_offload(stock, tmp_path, execution_device=torch.device("cpu"))
    enable_raincheck(stock)
    found: dict[int, Any] = {}

    def talk(number: int) -> None:
        found[number] = two_turns(stock, cases[number], {**LAZY, "completion": "background"})

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, case in enumerate(cases):
        assert_alike(found[number], two_turns(model_of(architecture), case), atol=0)


@pytest.mark.timeout(600)
def test_data_parallel_answers_are_those_of_one_process() -> None:
    """`accelerate launch` with two gloo processes; results are gathered in the first."""
    gathered = data_parallel.launch("qwen3_vl_small", "cpu", 6, 6, conversations=3, processes=2)
    assert gathered["processes"] == 2 and sorted(gathered["of_each_process"]) == [1, 2]
    alone = data_parallel.share("qwen3_vl_small", "cpu", 6, 6, range(3))
    assert gathered["answers"] == alone["answers"]
    assert len(gathered["tpot_ms"]) == 2 and all(step > 0 for step in gathered["tpot_ms"])
    assert len({tuple(tokens) for tokens in gathered["answers"]}) == 3


@pytest.mark.parametrize("size", ["qwen3_vl_small", "qwen3_5_small"])
def test_the_measured_conversation_restores_everything(size: str) -> None:
    model = enable_raincheck(build(size, "cpu"))
    spoken = converse(model, side=6, tokens=8)
    assert len(spoken.tokens) == sum(map(len, spoken.logits)) == 16
    assert model.raincheck_report.pending == 0
    later = converse(model, side=6, tokens=8, way=WAYS["background"])
    assert later.pending == [36 - 11, 0]  # 30 % of 36 tokens, rounded up, are in the prefill


# Sharded models


@pytest.fixture
def _one_process_group(tmp_path: Any) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process_group")
def test_fsdp_is_refused(stock: Any, inputs: Any) -> None:
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    enable_raincheck(stock)
    fully_shard(stock, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="sharded by FSDP.*device_map"):
        ask(stock, inputs)


@pytest.mark.usefixtures("_one_process_group")
def test_ddp_is_refused_and_its_inner_model_works(
    architecture: str, stock: Any, inputs: Any
) -> None:
    wrapped = nn.parallel.DistributedDataParallel(stock)
    with pytest.raises(ValueError, match="DistributedDataParallel.*unwrap_model"):
        enable_raincheck(wrapped)
    assert_same(ask(enable_raincheck(wrapped.module), inputs), ask(model_of(architecture), inputs))


@pytest.mark.parametrize("mark", ["tensor parallelism", "DeepSpeed ZeRO-3"])
def test_other_sharding_is_refused(stock: Any, inputs: Any, mark: str) -> None:
    """By what transformers and DeepSpeed leave on a model that they have sharded."""
    enable_raincheck(stock)
    if mark == "tensor parallelism":
        stock._tp_size = 2
    else:
        next(stock.parameters()).ds_id = 0
    with pytest.raises(ValueError, match=f"sharded by {mark}"):
        ask(stock, inputs)


# Gradient checkpointing


def test_gradient_checkpointing_left_on(architecture: str, stock: Any, inputs: Any) -> None:
    stock.train()
    stock.gradient_checkpointing_enable()
    stock.enable_input_require_grads()
    stock.config.use_cache = False  # as trainers leave it
    enable_raincheck(stock)
    with pytest.raises(ValueError, match="evaluation mode"):
        ask(stock, inputs)
    found = two_turns(stock.eval(), inputs, BLOCKING)
    assert_alike(found, two_turns(model_of(architecture), inputs), atol=0)
    assert not logits_of(found[0]).requires_grad


# Quantised weights


def bitsandbytes_8() -> Any:
    pytest.importorskip("bitsandbytes", reason="int8 weights need bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def bitsandbytes_4() -> Any:
    pytest.importorskip("bitsandbytes", reason="nf4 weights need bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def torchao_int8() -> Any:
    return _torchao("Int8WeightOnlyConfig")


def torchao_float8() -> Any:
    return _torchao("Float8WeightOnlyConfig")


def _torchao(name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="the weights need torchao")
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


@pytest.mark.parametrize("config", [bitsandbytes_8, bitsandbytes_4, torchao_int8, torchao_float8])
def test_quantised_weights(architecture: str, config: Callable[[], Any]) -> None:
    """Full retention is stock's answer; turn 2 reads off what turn 1 did not see."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        tiny.folder(architecture), quantization_config=config(), dtype=torch.float32,
        device_map={"": "cpu"},
    ).eval()  # fmt: skip
    plain = nn.Parameter(torch.empty(0))
    linear = model.model.language_model.layers[0].mlp.up_proj
    assert type(linear) is not nn.Linear or type(linear.weight.data) is not type(plain.data)
    processor = tiny.load(architecture)[1]
    board = tiny.make_board(8, 8, rng=2)
    question, answer = board.ask_row(2)
    content = [{"type": "image", "image": board.image()}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True,
        return_tensors="pt", add_generation_prompt=True,
    )  # fmt: skip
    stock = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    enable_raincheck(model)
    full = model.generate(**inputs, raincheck={"retention": 1.0}, max_new_tokens=10)
    assert answer_of(inputs, full) == answer_of(inputs, stock)
    chat = RaincheckSession(model, processor, RaincheckConfig(selector="uniform"))
    chat.ask("What is in D5?", images=[board.image()], max_new_tokens=4)
    assert chat.ask(question, max_new_tokens=12) == answer
    assert chat.report is not None and chat.report.executor == "modules"
