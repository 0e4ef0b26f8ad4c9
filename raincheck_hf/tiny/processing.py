"""The processor of the small models: a real `Qwen3VLProcessor` around a small tokenizer.

The tokenizer is byte-level BPE, without any normalisation, so that every text survives the round
trip and streamed pieces join to the whole. Names of cells, rows, columns, boards and frames are
single tokens; digits never merge.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from raincheck_hf.tiny.boards import CELL, MAX_SIDE, address, column_letter

PATCH, MERGE, TEMPORAL = 16, 2, 2
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NAMES = (
    *(address(row, col) for row in range(MAX_SIDE) for col in range(MAX_SIDE)),
    *(f"row {row + 1}" for row in range(MAX_SIDE)),
    *(f"column {column_letter(col)}" for col in range(MAX_SIDE)),
    *(f"board {number}" for number in range(1, 9)),
    *(f"frame {number}" for number in range(1, 17)),
)
"""What a question can point at; each is one token."""
WORDS = "system user assistant What is in of Read the row column board frame seconds"
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] in ('image', 'image_url') %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part['type'] == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] }}
            {%- else %}
                {{- raise_exception('a part of a message is image, video or text, not ' \
+ part['type']) }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: 8 special tokens, 256 bytes, the words of the questions, and `NAMES`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator([*WORDS.split(), *(f" {word}" for word in WORDS.split())], trainer)
    core.add_tokens([AddedToken(name, single_word=True, normalized=False) for name in NAMES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=32768,
    )


def build_processor() -> Qwen3VLProcessor:
    """The processor, from nothing.

    Pictures whose sides are multiples of 32 pixels keep their size up to 1,024 tokens; larger ones
    shrink to that. Videos keep every picture handed in, two to a frame, up to 4,096 tokens.
    """
    shape = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": TEMPORAL}
    look = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    token = CELL * CELL
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": token, "longest_edge": 1024 * token}, **shape, **look
        ),
        tokenizer=build_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": TEMPORAL * token, "longest_edge": TEMPORAL * 4096 * token},
            do_sample_frames=False,
            cap_pixels_per_frame=False,
            **shape,
            **look,
        ),
        chat_template=CHAT_TEMPLATE,
    )
