"""What docs/results.md claims of quality, in small."""

from __future__ import annotations

import pytest

from raincheck_hf.bench.quality import run_quality
from raincheck_hf.bench.settings import SELECTORS, Settings
from raincheck_hf.bench.summary import ALL, Line


@pytest.fixture(scope="module")
def claims(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """A board that is read in the first turn and asked about in seven more, by selector."""
    subset = Settings(models=(architecture,), boards=0, reads=1, read_size=(8, 8), read_turns=8)
    lines = run_quality(subset, tmp_path_factory.mktemp("claims") / "rows.jsonl")
    return [line for line in lines if line.dialogues == ALL]


@pytest.mark.parametrize("selector", SELECTORS)
def test_raincheck_makes_the_loss_good(claims: list[Line], selector: str) -> None:
    """The claims of docs/results.md, on one smaller board."""
    found = {(line.way, line.span): line for line in claims if line.selector in (None, selector)}
    assert found["full", "turns 2+"].accuracy.point >= 0.93
    assert found["hard", "turns 2+"].accuracy.point <= 0.75
    later, every = found["raincheck", "turns 2+"], found["raincheck", "all turns"]
    assert later.recovery is not None and later.recovery.point >= 0.90
    assert every.recovery is not None
    first = {
        way: found[way, "turn 1"].accuracy.point for way in ("hard", "raincheck", "post_answer")
    }
    assert first["post_answer"] == first["hard"]
    if every.ended_in_guard:  # nothing could ride
        assert first["raincheck"] == first["hard"]
    else:
        assert every.recovery.point >= 0.777
        assert first["raincheck"] > first["post_answer"] + 0.2


def test_most_first_answers_go_on_past_the_guard(claims: list[Line]) -> None:
    """Else the claims about long first answers would hold of nothing."""
    own = [line for line in claims if line.way == "raincheck" and line.span == "turn 1"]
    assert len(own) == len(SELECTORS)
    assert sum(line.ended_in_guard for line in own) <= 2
