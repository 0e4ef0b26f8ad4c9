"""The shipped processors: text survives, names are single tokens, pictures keep their size."""

import io
import unicodedata
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    Qwen3_5Tokenizer,
    Qwen3VLProcessor,
    TextIteratorStreamer,
)

from raincheck_hf.tiny import NAMES, as_video, folder, make_board
from raincheck_hf.tiny.processing import NAMES as NAMED
from raincheck_hf.tiny.processing import SPECIAL, build_processor


@pytest.fixture(scope="module", params=NAMES)
def processor(request: pytest.FixtureRequest) -> Iterator[Qwen3VLProcessor]:
    return AutoProcessor.from_pretrained(folder(request.param), local_files_only=True)


def rendered(processor: Qwen3VLProcessor, *content: dict):
    return processor.apply_chat_template(
        [{"role": "user", "content": list(content)}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def test_is_a_real_processor(processor: Qwen3VLProcessor) -> None:
    assert type(processor) is Qwen3VLProcessor


def test_shipped_tokenizer_is_what_the_code_builds(processor: Qwen3VLProcessor) -> None:
    assert processor.tokenizer.get_vocab() == build_processor().tokenizer.get_vocab()
    assert processor.chat_template == build_processor().chat_template


@pytest.mark.parametrize(
    "words",
    [
        "What is in D5 of board 2?",
        "  two  spaces,\ttabs\n\n\nand lines \r\n ",
        "A\u030a is not \u00c5; 日本語, עברית, 🎉👩‍🚀, \u200b\ufeff",
        "D55 xD5 D5x row 1x A4/B6",
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n",
        "".join(map(chr, range(1, 0x250))),
    ],
)
def test_every_text_survives(processor: Qwen3VLProcessor, words: str) -> None:
    ids = processor.tokenizer(words).input_ids
    if isinstance(processor.tokenizer, Qwen3_5Tokenizer):
        # The class transformers insists on for this model type composes characters first.
        words = unicodedata.normalize("NFC", words)
    assert processor.tokenizer.decode(ids) == words


def test_streamed_pieces_join_to_the_whole(processor: Qwen3VLProcessor) -> None:
    words = "The 7 is at D5, 日本語 🎉."
    streamer = TextIteratorStreamer(processor.tokenizer)
    for token in processor.tokenizer(words).input_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(streamer) == words


def test_names_and_special_tokens_are_single_tokens(processor: Qwen3VLProcessor) -> None:
    encode = processor.tokenizer
    for name in (*NAMED, *SPECIAL):
        assert len(encode(name).input_ids) == 1, name
    assert encode.tokenize("What is in D5?") == ["What", "Ġis", "Ġin", "Ġ", "D5", "?"]
    assert encode.tokenize("Read row 12.")[2:] == ["row 12", "."]
    assert encode.tokenize("Read column D.")[2:] == ["column D", "."]
    assert encode.tokenize("D55")[0] == "D"


def test_each_digit_is_a_token(processor: Qwen3VLProcessor) -> None:
    assert processor.tokenizer.tokenize("0123456789") == list("0123456789")


def test_chat_format(processor: Qwen3VLProcessor) -> None:
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image"}, text("What is in D5?")]},
        {"role": "assistant", "content": [text("7")]},
        {"role": "user", "content": [{"type": "video"}, text("Read row 3.")]},
    ]
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nLook.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is in D5?<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>Read row 3.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (8, 8), (12, 12), (16, 16), (24, 24), (2, 24)])
def test_one_token_a_cell(processor: Qwen3VLProcessor, size: tuple[int, int]) -> None:
    board = make_board(*size, 0)
    inputs = rendered(processor, {"type": "image", "image": board.image()}, text("Read row 1."))
    assert inputs.image_grid_thw.tolist() == [[1, 2 * size[0], 2 * size[1]]]
    pads = (inputs.input_ids == processor.image_token_id).sum().item()
    assert pads == size[0] * size[1] == inputs.mm_token_type_ids.sum().item()


def test_a_board_reaches_the_model_unchanged(processor: Qwen3VLProcessor) -> None:
    board = make_board(2, 3, 0)
    values = rendered(processor, {"type": "image", "image": board.image()}).pixel_values
    cell = values[:4].view(2, 2, 3, 2, 16, 16)[:, :, 0, 0].permute(0, 2, 1, 3).reshape(32, 32)
    assert np.allclose(cell.numpy(), board.pixels()[:32, :32] / 127.5 - 1, atol=1e-5)


def test_large_photographs_shrink(processor: Qwen3VLProcessor) -> None:
    photo = Image.new("RGB", (4000, 3000))
    inputs = rendered(processor, {"type": "image", "image": photo}, text("What is it?"))
    assert 700 <= (inputs.input_ids == processor.image_token_id).sum().item() <= 1024


@pytest.mark.parametrize("frames", [1, 3, 8])
@pytest.mark.parametrize("as_array", [False, True])
def test_pairs_of_pictures_are_frames(
    processor: Qwen3VLProcessor, frames: int, as_array: bool
) -> None:
    video = as_video([make_board(4, 5, seed) for seed in range(frames)])
    if as_array:
        video = np.stack([np.asarray(picture) for picture in video])
    inputs = rendered(processor, {"type": "video", "video": video}, text("What is in A1?"))
    assert inputs.video_grid_thw.tolist() == [[frames, 8, 10]]
    assert (inputs.input_ids == processor.video_token_id).sum().item() == frames * 20


def test_an_unknown_part_is_refused(processor: Qwen3VLProcessor) -> None:
    with pytest.raises(Exception, match="image, video or text"):
        processor.apply_chat_template([{"role": "user", "content": [{"type": "smell"}]}])


def test_saves_and_loads(processor: Qwen3VLProcessor, tmp_path) -> None:
    processor.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path, local_files_only=True)
    buffer = io.BytesIO()
    make_board(2, 2, 0).image().save(buffer, "PNG")
    image = Image.open(buffer)
    one, two = (rendered(p, {"type": "image", "image": image}) for p in (processor, again))
    assert one.input_ids.equal(two.input_ids) and one.pixel_values.equal(two.pixel_values)
