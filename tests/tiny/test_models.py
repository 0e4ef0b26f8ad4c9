"""The shipped models: they load like any other, are as small as promised, and can see."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    pipeline,
)

from raincheck_hf import tiny
from raincheck_hf.tiny import Board, as_video, folder, load, make_board

Loaded = tuple[PreTrainedModel, Qwen3VLProcessor]
CLASSES = {
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_5": Qwen3_5ForConditionalGeneration,
}


@pytest.fixture(scope="module", params=tiny.NAMES)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return load(request.param)


def conversation(board: Board, *questions: tuple[str, str]) -> list[dict]:
    messages: list[dict] = []
    for question, answer in questions:
        image = [] if messages else [{"type": "image", "image": board.image()}]
        content = [*image, {"type": "text", "text": question}]
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    return messages


def generated(loaded: Loaded, messages: list[dict], **kwargs) -> str:
    model, processor = loaded
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    out = model.generate(**inputs, **kwargs)
    return processor.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def accuracy(loaded: Loaded, size: tuple[int, int], kind: str, count: int, turns: int) -> float:
    """Share of right digits, every answer forced, in one stock forward over `count` boards."""
    model, processor = loaded
    rng = np.random.default_rng(11)
    talks = []
    for _ in range(count):
        board = make_board(*size, rng)
        ask = {
            "cell": lambda board=board: board.ask_random_cell(rng),
            "row": lambda board=board: board.ask_row(int(rng.integers(size[0]))),
            "column": lambda board=board: board.ask_column(int(rng.integers(size[1]))),
            "board": board.ask_board,
        }[kind]
        talks.append(conversation(board, *(ask() for _ in range(turns))))
    inputs = processor.apply_chat_template(
        talks, tokenize=True, return_dict=True, return_tensors="pt"
    )
    guess = model(**inputs).logits[:, :-1].argmax(-1)
    wanted, text = inputs.input_ids[:, 1:], inputs.input_ids
    digit = torch.tensor(processor.tokenizer.convert_tokens_to_ids(list("0123456789")))
    is_digit = torch.isin(wanted, digit)
    assert is_digit.any() and text.shape[0] == count
    return (guess == wanted)[is_digit].float().mean().item()


def test_load(loaded: Loaded) -> None:
    model, processor = loaded
    assert not model.training and model.dtype == torch.float32
    assert model.config._attn_implementation == "sdpa"
    assert isinstance(processor, Qwen3VLProcessor)
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    assert not model.generation_config.do_sample


def test_unknown_names_are_refused() -> None:
    for function in (load, folder):
        with pytest.raises(ValueError, match="qwen3_vl, qwen3_5"):
            function("qwen2")


@pytest.mark.parametrize("name", tiny.NAMES)
def test_auto_classes(name: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder(name), local_files_only=True)
    processor = AutoProcessor.from_pretrained(folder(name), local_files_only=True)
    assert type(model) is CLASSES[name] and model.dtype == torch.float32
    assert type(processor) is Qwen3VLProcessor


@pytest.mark.parametrize("name", tiny.NAMES)
def test_sizes(name: str) -> None:
    assert (folder(name) / "model.safetensors").stat().st_size <= 10_000_000


def test_architecture() -> None:
    vl, hybrid = (load(name)[0].config for name in tiny.NAMES)
    assert len(vl.vision_config.deepstack_visual_indexes) >= 2
    for text in (vl.text_config, hybrid.text_config):
        assert text.head_dim == 64
        assert text.num_attention_heads > text.num_key_value_heads
    text = hybrid.text_config
    assert {"linear_attention", "full_attention"} == set(text.layer_types)
    assert text.linear_num_value_heads > text.linear_num_key_heads
    assert text.linear_conv_kernel_dim == 4
    rotary = int(64 * text.rope_parameters["partial_rotary_factor"])
    assert 2 * sum(text.rope_parameters["mrope_section"]) == rotary
    assert 2 * sum(vl.text_config.rope_parameters["mrope_section"]) == 64


def test_recurrent_layers_have_long_memory() -> None:
    model, _ = load("qwen3_5")
    layers = model.model.language_model.layers
    decay = torch.cat([x.linear_attn.A_log for x in layers if hasattr(x, "linear_attn")])
    assert decay.max() < -1.5


@pytest.mark.parametrize(
    ("size", "kind", "count", "turns", "least"),
    [
        ((8, 8), "cell", 24, 8, 0.95),
        ((12, 12), "cell", 12, 8, 0.95),
        ((8, 8), "row", 8, 4, 0.93),
        ((8, 8), "column", 8, 4, 0.93),
        ((8, 8), "board", 8, 1, 0.93),
        ((12, 12), "board", 4, 1, 0.93),
    ],
)
def test_reads_held_out_boards(
    loaded: Loaded, size: tuple[int, int], kind: str, count: int, turns: int, least: float
) -> None:
    assert accuracy(loaded, size, kind, count, turns) >= least


def test_generates_a_whole_board(loaded: Loaded) -> None:
    board = make_board(8, 8, 5)
    question, answer = board.ask_board()
    messages = conversation(board, (question, ""))[:1]
    said = generated(loaded, messages, max_new_tokens=80)
    assert len(said) == 64
    assert np.mean([a == b for a, b in zip(said, answer, strict=True)]) > 0.9


def test_answers_after_a_long_answer(loaded: Loaded) -> None:
    right = 0
    for seed in range(4):
        board = make_board(8, 8, 100 + seed)
        question, answer = board.ask_cell(4, 3)
        messages = conversation(board, board.ask_board(), (question, ""))[:3]
        right += generated(loaded, messages, max_new_tokens=4) == answer
    assert right >= 3


def test_several_boards_and_video_run(loaded: Loaded) -> None:
    shown = [make_board(4, 4, seed) for seed in range(3)]
    images = [{"type": "image", "image": board.image()} for board in shown]
    video = [{"type": "video", "video": as_video(shown)}]
    for pictures, of in ((images, "board 2"), (video, "frame 2")):
        question, _ = shown[1].ask_cell(1, 2, of)
        content = [*pictures, {"type": "text", "text": question}]
        said = generated(loaded, [{"role": "user", "content": content}], max_new_tokens=4)
        assert said.isdigit() and len(said) == 1


def test_pipeline(loaded: Loaded) -> None:
    model, processor = loaded
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    board = make_board(8, 8, 2)
    messages = conversation(board, (board.ask_cell(2, 2).question, ""))[:1]
    out = pipe(text=messages, max_new_tokens=4, return_full_text=False)
    assert out[0]["generated_text"].isdigit()
