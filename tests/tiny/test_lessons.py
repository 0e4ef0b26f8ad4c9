"""What is trained on is what the processor and the stock models would see."""

import re

import numpy as np
import pytest
import torch

from raincheck_hf.tiny import NAMES, Board, as_video, load
from raincheck_hf.tiny.forward import BatchedForward, Handwriting
from raincheck_hf.tiny.lessons import IGNORE, Lesson, Plan, Teacher, Turn
from raincheck_hf.tiny.plans import STAGES, Planner
from raincheck_hf.tiny.processing import build_processor

TALK = Plan(
    3,
    4,
    (
        Turn("cell", shown=1),
        Turn("row"),
        Turn("column"),
        Turn("board"),
        Turn("cell", 1, shown=2, named=True),
        Turn("cell", 2),
    ),
    system=True,
)
VIDEO = Plan(3, 3, (Turn("cell", 1, shown=3, named=True), Turn("cell", 2, named=True)), 24.0)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(build_processor().tokenizer)


def as_inputs(processor, lesson: Lesson):
    """The first row of a lesson, through the chat template."""
    plan = lesson.plan
    shown = [Board(cells) for cells in lesson.cells[0].numpy().reshape(-1, plan.rows, plan.cols)]
    text = processor.tokenizer.decode(lesson.ids[0])
    messages = []
    for role, body in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.S):
        words = re.sub(r"(<\|vision_start\|>|<[\d.]+ seconds>).*<\|vision_end\|>", "", body)
        count = len(re.findall(r"(?:_pad\|>)+?<\|vision_end\|>", body))
        content: list[dict] = []
        if count and plan.video_fps is not None:
            content = [{"type": "video", "video": as_video(shown)}]
        elif count:
            content = [{"type": "image", "image": board.image()} for board in shown[:count]]
            shown = shown[count:]
        messages.append({"role": role, "content": [*content, {"type": "text", "text": words}]})
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", [TALK, VIDEO])
@torch.no_grad()
def test_lessons_are_what_stock_models_see(name: str, plan: Plan, teacher: Teacher) -> None:
    model, processor = load(name)
    lesson = teacher.fill(plan, 2, np.random.default_rng(0))
    inputs = as_inputs(processor, lesson)
    assert torch.equal(inputs.input_ids[0], lesson.ids[0])
    states = BatchedForward(model)(lesson, *Handwriting().draw(lesson.cells, distort=False))
    logits = model.lm_head(states.final[:1])
    assert (logits - model(**inputs).logits).abs().max() < 1e-3


def test_answers_are_the_next_tokens(teacher: Teacher) -> None:
    lesson = teacher.fill(TALK, 3, np.random.default_rng(0))
    assert torch.equal(lesson.ids[:, lesson.answer_at + 1], lesson.answers)


@pytest.mark.parametrize("late", [False, True])
def test_reordered_lessons_keep_every_token(late: bool, teacher: Teacher) -> None:
    plan = Plan(4, 4, (Turn("board", shown=1), Turn("cell")), shuffled=not late, late=late)
    moved = 0
    for seed in range(8):
        lesson = teacher.fill(plan, 2, np.random.default_rng(seed))
        length = lesson.ids.shape[1]
        assert torch.equal(lesson.sequence.sort().values, torch.arange(length))
        moved += not torch.equal(lesson.sequence, torch.arange(length))
        text = lesson.sequence[~torch.isin(lesson.sequence, lesson.visual)]
        assert torch.equal(text, text.sort().values)
        hidden = (lesson.answers == IGNORE).any(0)
        assert late or not hidden.any()
        assert not hidden[lesson.kinds.index("end") :].any()
    assert moved == 8


def test_unseen_cells_are_not_asked_for(teacher: Teacher) -> None:
    plan = Plan(4, 4, (Turn("board", shown=1),), late=True)
    for seed in range(8):
        lesson = teacher.fill(plan, 1, np.random.default_rng(seed))
        rank = lesson.sequence.argsort()
        seen = rank[lesson.visual] < rank[lesson.answer_at[:16]]
        assert torch.equal(lesson.answers[0, :16] != IGNORE, seen)


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_every_plan_can_be_taught(stage: int, teacher: Teacher) -> None:
    rng = np.random.default_rng(stage)
    planner = Planner(rng, tokens=600)
    for _ in range(30):
        lesson = teacher.fill(*planner.draw(stage), rng)
        assert len(lesson.visual) == lesson.cells.shape[1] == len(lesson.names)
        assert lesson.cells.max() < 1500
