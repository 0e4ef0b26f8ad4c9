"""Ablations that cannot be configured: what they change, and that nothing stays changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from raincheck_hf.bench import ablations, ways
from raincheck_hf.bench.checkpoints import load
from raincheck_hf.bench.tasks import make_exam
from raincheck_hf.cache import RaincheckCache
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.executor import modules
from raincheck_hf.recurrent import Checkpoint, Factors, RecurrentState


def switches() -> tuple[object, ...]:
    return RecurrentState.moved, modules.ModulesExecutor.run, modules.visible_slots


@pytest.mark.parametrize("context", [ablations.uncorrected, ablations.by_position])
def test_everything_is_put_back(context: Callable[[], AbstractContextManager[None]]) -> None:
    before = switches()
    with context():
        assert switches() != before
    assert switches() == before
    with pytest.raises(ZeroDivisionError), context():
        raise ZeroDivisionError
    assert switches() == before


def test_the_correction_is_off_inside_the_context() -> None:
    prefix = Checkpoint(torch.zeros(2, 3, 3), torch.zeros(4, 3))
    moved = Checkpoint(torch.ones(2, 3, 3), torch.ones(4, 3))
    token = Factors(torch.zeros(4, 1), torch.zeros(1, 2), torch.zeros(1, 2))
    state = RecurrentState(prefix, live=prefix, lead=token, lead_state=prefix.state)
    with ablations.uncorrected():
        after = state.moved(None, moved)  # type: ignore[arg-type]
        assert after.prefix is moved and after.live is prefix
        empty = RecurrentState.at(prefix).moved(None, moved)  # type: ignore[arg-type]
        assert empty.live is moved


def keys(way: str, chunk: int = 5) -> dict[int, torch.Tensor]:
    """Keys of a conversation about 4×5 cells, all restored, by attention layer."""
    model, processor = load("qwen3_vl")
    exam = make_exam("reading", (4, 5), 1, seed=3, number=0)
    content = [{"type": "image"}, {"type": "text", "text": exam.asked[0].question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[exam.board.image()], return_tensors="pt")
    base = RaincheckConfig(
        selector=lambda context: torch.arange(context.n) % 3 == 0,
        guard_tokens=1,
        chunk_size=chunk,
        completion="lazy",
    )
    cache = RaincheckCache(model)
    with ways.circumstances(way):
        model.generate(
            **inputs, raincheck=ways.config_of(way, base), cache=cache, do_sample=False,
            min_new_tokens=6, max_new_tokens=6,
        )  # fmt: skip
        cache.finish()
    stop = cache.conversation.regions.answer_start
    return {i: buffer.read(stop)[0].clone() for i, buffer in cache.buffers.items()}


def test_by_position_hides_what_stands_behind() -> None:
    """Rows of P are as ever; what is restored differs from the second layer on."""
    region, position = keys("raincheck"), keys("by_position")
    start = region[0].shape[2] - 13  # of 20 cells, 7 are selected
    for layer in region:
        assert torch.equal(region[layer][:, :, :start], position[layer][:, :, :start])
    assert torch.equal(region[0], position[0])  # keys of the first layer are of the row alone
    difference = (region[1] - position[1])[:, :, start:].abs().amax(dim=(0, 1, 3))
    assert (difference > 1e-3).all()  # every deferred row has the question behind it


def test_by_position_does_not_depend_on_the_chunk() -> None:
    """A row sees what precedes it and is restored: all of that, whatever the chunk size is."""
    some, other = keys("by_position"), keys("by_position", chunk=1)
    for layer in some:
        torch.testing.assert_close(some[layer], other[layer], atol=1e-4, rtol=1e-4)
