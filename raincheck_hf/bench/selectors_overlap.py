"""How much a second question's selection differs from the first's (the paper's §2.1)."""

from __future__ import annotations

from typing import Any

from raincheck_hf.bench.dialogue import Asked, Script
from raincheck_hf.bench.tasks import make_exam
from raincheck_hf.config import RaincheckConfig

_SIZE = (8, 8)


def measure_overlap(
    model: Any, processor: Any, selector: str, retention: float, boards: int, device: str
) -> dict[str, float]:
    """Ask two questions about a picture, each in a fresh conversation, and compare selections.

    Args:
        model: enabled.
        processor: its processor.
        selector: a registered name.
        retention: fraction of tokens selected.
        boards: pictures to take the mean over.
        device: where the model is.

    Returns:
        `missing`: share of the second question's selection that is not in the first's. A method
        that does not read the question has 0.
    """
    missing = []
    for number in range(boards):
        exam = make_exam("cells", _SIZE, 2, 0, number)
        config = RaincheckConfig(
            selector=selector, retention=retention, completion="lazy", seed=exam.draw
        )
        first, second = (
            _selected(model, processor, exam.board.image(), ask, config, device)
            for ask in exam.asked
        )
        missing.append(len(second - first) / len(second))
    return {"missing": round(sum(missing) / len(missing), 6)}


def _selected(
    model: Any, processor: Any, image: Any, ask: Asked, config: RaincheckConfig, device: str
) -> set[int]:
    """Positions selected; the picture comes before the question, so that they can be compared."""
    script = Script(processor, image, [Asked(ask.question, ask.truth, 1)], device)
    return set(script.run(model, "hard", config)[0].report.selected.tolist())
