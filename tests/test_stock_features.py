"""What stock generate offers for one sequence, with raincheck=, on the tiny models."""

from __future__ import annotations

import copy
import json
from functools import cache
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from helpers_turns import answer_of, ask, assert_close, assert_same, logits_of, model_of
from reference import random_inputs
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from raincheck_hf import RaincheckCache, RaincheckConfig, RaincheckReport, enable_raincheck, tiny

SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 50}


@cache
def loaded(architecture: str) -> SimpleNamespace:
    model, processor = tiny.load(architecture)
    board = tiny.make_board(3, 3, 0)
    content = [{"type": "image"}, {"type": "text", "text": "Read the board."}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=[board.image()], return_tensors="pt")
    config = RaincheckConfig(selector="uniform", chunk_size=2, guard_tokens=2)
    return SimpleNamespace(
        model=enable_raincheck(model, config), processor=processor, board=board,
        tokenizer=processor.tokenizer, inputs=dict(inputs), messages=messages,
    )  # fmt: skip


@pytest.fixture
def tiny_one(architecture):
    return loaded(architecture)


def generate(one, raincheck=True, **kwargs):
    """A forced answer of 6 tokens unless told otherwise."""
    settings = {"min_new_tokens": 6, "max_new_tokens": 6, "raincheck": raincheck, **kwargs}
    return one.model.generate(**one.inputs, **settings)


def new_tokens(one, sequences) -> list[int]:
    return answer_of(one.inputs, sequences)


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1


class Ban(LogitsProcessor):
    def __init__(self, token):
        self.token, self.calls = token, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.token] = -torch.inf
        return scores


class StopAfter(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


# What comes back


def test_a_tensor_by_default(tiny_one):
    out = generate(tiny_one)
    length = tiny_one.inputs["input_ids"].shape[1]
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, length + 6)
    assert torch.equal(out[:, :length], tiny_one.inputs["input_ids"])
    report = tiny_one.model.raincheck_report
    assert isinstance(report, RaincheckReport)
    assert (report.n_visual, report.n_selected, report.n_deferred) == (9, 3, 6)
    assert report.restored_per_step == [0, 0, 2, 2, 2]
    assert report.pending == 0
    assert report.completion_ms is None


def test_an_output_with_cache_and_report(tiny_one):
    out = generate(tiny_one, return_dict_in_generate=True)
    assert type(out).__name__ == "RaincheckOutput"
    assert isinstance(out, ModelOutput)
    assert list(out.keys()) == ["sequences", "cache", "raincheck"]
    assert out["cache"] is out.cache
    assert isinstance(out.cache, RaincheckCache)
    assert out.raincheck is out["raincheck"] is out.cache.report is tiny_one.model.raincheck_report
    assert out.to_tuple() == (out.sequences, out.cache, out.raincheck)
    assert torch.equal(out.sequences, generate(tiny_one))


def test_the_report_is_plain(tiny_one):
    report = generate(tiny_one, return_dict_in_generate=True).raincheck
    ids = tiny_one.inputs["input_ids"][0]
    both = torch.cat([report.selected, report.deferred])
    places = (ids == tiny_one.model.config.image_token_id).nonzero().flatten()
    assert torch.equal(both.sort().values, places)
    assert torch.equal(report.deferred, report.deferred.sort().values)
    assert len(report.step_ms) == len(report.restored_per_step) == 5
    assert json.loads(json.dumps(report.to_dict()))["n_visual"] == 9
    assert "multimodal tokens" in report.summary()


@pytest.mark.parametrize("retention", [1.0, 0.3])
def test_logits_and_scores(tiny_one, retention):
    kwargs = {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    out = generate(tiny_one, {"retention": retention}, **kwargs)
    stock = generate(tiny_one, None, **kwargs)
    assert len(out.logits) == len(out.scores) == 6
    assert all(step.shape == stock.logits[0].shape for step in (*out.logits, *out.scores))
    eos = tiny_one.model.generation_config.eos_token_id
    assert bool(torch.isinf(out.scores[0][0, eos]))
    assert not torch.isinf(out.logits[0]).any()
    if retention == 1:
        assert_close(logits_of(out), logits_of(stock))
        assert torch.equal(out.sequences, stock.sequences)
    else:
        assert not torch.allclose(out.logits[0], stock.logits[0], atol=1e-3)


def test_inputs_by_position_and_by_either_name(tiny_one):
    want = generate(tiny_one)
    rest = {key: value for key, value in tiny_one.inputs.items() if key != "input_ids"}
    ids = tiny_one.inputs["input_ids"]
    settings = {"min_new_tokens": 6, "max_new_tokens": 6, "raincheck": True}
    assert torch.equal(tiny_one.model.generate(ids, **rest, **settings), want)
    assert torch.equal(tiny_one.model.generate(inputs=ids, **rest, **settings), want)
    del rest["attention_mask"], rest["mm_token_type_ids"]
    assert torch.equal(tiny_one.model.generate(ids, **rest, **settings), want)


def test_no_multimodal_tokens_run_as_stock(architecture):
    model = model_of(architecture)
    inputs = random_inputs(model, 1, "text only")
    out = ask(model, inputs)
    stock = model.generate(
        **inputs, max_new_tokens=4, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, stock.sequences)
    assert_close(logits_of(out), logits_of(stock))
    assert (out.raincheck.n_visual, out.cache.pending) == (0, 0)
    assert out.raincheck.vision_ms is None
    assert out.raincheck.select_ms is None


# Sampling and length


def test_sampling_is_reproducible(tiny_one):
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(new_tokens(tiny_one, generate(tiny_one, max_new_tokens=12, **SAMPLING)))
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("selector", ["random", "mmtok"])
def test_full_retention_samples_as_stock(tiny_one, selector):
    torch.manual_seed(3)
    stock = generate(tiny_one, None, **SAMPLING)
    torch.manual_seed(3)
    out = generate(tiny_one, {"retention": 1, "selector": selector}, **SAMPLING)
    assert torch.equal(out, stock)


def test_a_selector_that_draws_leaves_the_samplers_seed_alone(tiny_one):
    torch.manual_seed(3)
    generate(tiny_one, {"selector": "random", "seed": 7})
    after_greedy = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after_greedy)


def test_one_token(tiny_one):
    out = generate(tiny_one, max_new_tokens=1, min_new_tokens=1, return_dict_in_generate=True)
    assert len(new_tokens(tiny_one, out)) == 1
    assert out.raincheck.restored_per_step == []
    assert out.raincheck.tpot_ms is None
    assert out.raincheck.ttft_ms > 0
    assert out.cache.get_seq_length() == tiny_one.inputs["input_ids"].shape[1]
    assert out.cache.pending == 6


def test_max_length(tiny_one):
    length = tiny_one.inputs["input_ids"].shape[1] + 3
    out = generate(tiny_one, max_new_tokens=None, max_length=length)
    assert out.shape == (1, length)


def test_max_time(tiny_one):
    assert len(new_tokens(tiny_one, generate(tiny_one, max_time=0.0))) == 1


def test_more_tokens_than_were_reserved(architecture):
    """Buffers grow in steps of 64 slots."""
    model = model_of(architecture)
    inputs = random_inputs(model, 1, "one image")
    long = ask(model, inputs, {"completion": "lazy"}, max_new_tokens=None, max_length=150)
    short = ask(model, inputs, {"completion": "lazy"}, max_new_tokens=8)
    assert long.sequences.shape == (1, 150)
    assert torch.equal(long.sequences[:, : short.sequences.shape[1]], short.sequences)
    assert long.raincheck.pending == 0


def test_a_generation_config_object(tiny_one):
    config = GenerationConfig(max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
    before = config.to_dict()
    out = tiny_one.model.generate(**tiny_one.inputs, generation_config=config, raincheck=True)
    assert len(out.logits) <= 3
    assert config.to_dict() == before


def test_the_models_generation_config(tiny_one, monkeypatch):
    monkeypatch.setattr(tiny_one.model.generation_config, "return_dict_in_generate", True)
    assert isinstance(generate(tiny_one).cache, RaincheckCache)


def test_end_of_text_inside_the_guard(tiny_one):
    first = new_tokens(tiny_one, generate(tiny_one))[1]
    out = generate(
        tiny_one, {"guard_tokens": 16, "completion": "lazy"}, min_new_tokens=None,
        eos_token_id=first, return_dict_in_generate=True,
    )  # fmt: skip
    answer = new_tokens(tiny_one, out)
    assert answer[-1] == first
    assert first not in answer[:-1]
    assert sum(out.raincheck.restored_per_step) == 0
    assert out.raincheck.pending == out.cache.pending == 6
    out.cache.finish()
    assert out.raincheck.pending == out.cache.pending == 0


# Streamers


@pytest.mark.parametrize("return_dict", [False, True])
def test_a_streamer_gets_prompt_tokens_and_one_end(tiny_one, return_dict):
    streamer = Recorder()
    out = generate(tiny_one, streamer=streamer, return_dict_in_generate=return_dict)
    assert streamer.puts[0] == tiny_one.inputs["input_ids"][0].tolist()
    assert streamer.puts[1:] == [[token] for token in new_tokens(tiny_one, out)]
    assert streamer.ends == 1


def test_a_text_iterator_streamer(tiny_one):
    streamer = TextIteratorStreamer(tiny_one.tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=generate, args=(tiny_one,), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tiny_one.tokenizer.decode(new_tokens(tiny_one, generate(tiny_one)))


def test_a_streamer_that_raises(tiny_one):
    class Gone(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 3:
                raise BrokenPipeError("closed")

    kept = RaincheckCache(tiny_one.model)
    with pytest.raises(BrokenPipeError):
        generate(tiny_one, streamer=Gone(), cache=kept)
    kept.finish()
    assert kept.pending == 0
    assert torch.equal(generate(tiny_one), generate(tiny_one))


# Processors and criteria


@pytest.mark.parametrize("kind", [list, LogitsProcessorList])
def test_logits_processors(tiny_one, kind):
    banned = new_tokens(tiny_one, generate(tiny_one))[0]
    processors = kind([Ban(banned)])
    out = generate(tiny_one, logits_processor=processors)
    assert banned not in new_tokens(tiny_one, out)
    assert processors[0].calls == 6
    assert len(processors) == 1


@pytest.mark.parametrize("kind", [list, StoppingCriteriaList])
def test_stopping_criteria(tiny_one, kind):
    criteria = kind([StopAfter(tiny_one.inputs["input_ids"].shape[1] + 3)])
    out = generate(tiny_one, stopping_criteria=criteria)
    assert new_tokens(tiny_one, out) == new_tokens(tiny_one, generate(tiny_one))[:3]
    assert len(criteria) == 1


def test_lists_can_be_used_again(tiny_one):
    processors, criteria = [Ban(3)], [StopAfter(10**6)]
    first = generate(tiny_one, logits_processor=processors, stopping_criteria=criteria)
    second = generate(tiny_one, logits_processor=processors, stopping_criteria=criteria)
    stock = generate(tiny_one, None, logits_processor=processors, stopping_criteria=criteria)
    assert torch.equal(first, second)
    assert stock.shape == first.shape
    assert (len(processors), len(criteria)) == (1, 1)


def test_stop_strings(tiny_one):
    answer = new_tokens(tiny_one, generate(tiny_one))
    stop = tiny_one.tokenizer.decode(answer[2])
    out = generate(tiny_one, stop_strings=[stop], tokenizer=tiny_one.tokenizer)
    text = tiny_one.tokenizer.decode(new_tokens(tiny_one, out))
    assert text.endswith(stop)
    assert len(new_tokens(tiny_one, out)) <= 3
    with pytest.raises(ValueError, match="tokenizer"):
        generate(tiny_one, stop_strings=[stop])


def test_prefix_allowed_tokens(tiny_one):
    allowed = [40, 41, 42]
    out = generate(tiny_one, prefix_allowed_tokens_fn=lambda batch, ids: allowed)
    assert set(new_tokens(tiny_one, out)) <= set(allowed)


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 50.0},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[40], [41]]},
        {"suppress_tokens": [40, 41, 42]},
        {"do_sample": True, "top_p": 0.5},
        {"do_sample": True, "min_p": 0.1},
        {"renormalize_logits": True},
    ],
)
def test_options_give_with_full_retention_what_stock_gives(tiny_one, option):
    torch.manual_seed(4)
    stock = generate(tiny_one, None, **option)
    torch.manual_seed(4)
    assert torch.equal(generate(tiny_one, {"retention": 1}, **option), stock)


# Around generate


def test_the_pipeline(tiny_one):
    run = pipeline("image-text-to-text", model=tiny_one.model, processor=tiny_one.processor)
    content = [
        {"type": "image", "image": tiny_one.board.image()},
        {"type": "text", "text": "Read the board."},
    ]
    kwargs = {"min_new_tokens": 6, "max_new_tokens": 6}
    (out,) = run(
        text=[{"role": "user", "content": content}], return_full_text=False,
        generate_kwargs={"raincheck": True, **kwargs},
    )  # fmt: skip
    want = tiny_one.tokenizer.decode(
        new_tokens(tiny_one, generate(tiny_one)), skip_special_tokens=True
    )
    assert out["generated_text"] == want
    assert tiny_one.model.raincheck_report.n_deferred == 6


def test_the_models_state_does_not_change(tiny_one):
    model = tiny_one.model
    model.model.rope_deltas = before = torch.tensor([[7]])
    own = set(vars(model)), set(vars(model.model)), set(vars(model.model.language_model))
    generate(tiny_one)
    assert model.model.rope_deltas is before
    model.model.rope_deltas = None
    generate(tiny_one)
    assert model.model.rope_deltas is None
    after = set(vars(model)), set(vars(model.model)), set(vars(model.model.language_model))
    assert tuple(now - {"raincheck_report"} for now in after) == (
        tuple(then - {"raincheck_report"} for then in own)
    )
    assert not model.training


def test_a_stock_turn_after_a_raincheck_turn(tiny_one):
    want = generate(tiny_one, None)
    generate(tiny_one)
    assert torch.equal(generate(tiny_one, None), want)


def test_from_inside_a_processor_another_conversation_may_run(tiny_one):
    want = generate(tiny_one)

    def processor(ids, scores):
        generate(tiny_one, max_new_tokens=2, min_new_tokens=2)
        generate(tiny_one, None, max_new_tokens=2, min_new_tokens=2)
        return scores

    assert torch.equal(generate(tiny_one, logits_processor=[processor]), want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_any_grad_mode(tiny_one, mode):
    want = generate(tiny_one)
    with mode():
        out = generate(tiny_one, return_dict_in_generate=True, output_logits=True)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert torch.equal(out.sequences, want)
    assert not out.logits[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_precisions(architecture, dtype):
    model = copy.deepcopy(model_of(architecture)).to(dtype)
    inputs = random_inputs(model, 1, "image, video, image")
    out = ask(model, inputs)
    assert torch.isfinite(logits_of(out)).all()
    full = ask(model, inputs, {"retention": 1})
    stock = model.generate(
        **inputs, max_new_tokens=4, output_logits=True, return_dict_in_generate=True
    )
    assert torch.equal(full.sequences[:, :-3], stock.sequences[:, :-3])
    assert_close(full.logits[0], stock.logits[0], atol=0.05)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attention_implementations(architecture, attention):
    model = model_of(architecture)
    inputs = random_inputs(model, 1, "two images")
    want = ask(model, inputs)
    model.set_attn_implementation(attention)
    try:
        out = ask(model, inputs)
    finally:
        model.set_attn_implementation("sdpa")
    assert_close(logits_of(out), logits_of(want))
    assert_same(ask(model, inputs), want)
