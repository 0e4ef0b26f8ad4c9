"""`raincheck-hf bench wrappers`: a fault on two devices is told from rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model

from raincheck_hf import enable_raincheck
from raincheck_hf.bench import two_cards, wrappers
from raincheck_hf.bench.divergence import compare, compare_turn
from raincheck_hf.bench.random_weights import build
from raincheck_hf.bench.wrappers import WAYS, converse


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_can_be_made_to_say_another_ones_tokens(way: str) -> None:
    """Its raw logits are those of the model, given these tokens."""
    model = enable_raincheck(build("qwen3_vl_small", "cpu"))
    own = converse(model, side=6, tokens=4, way=WAYS[way])
    again = converse(model, side=6, tokens=4, way=WAYS[way], say=own.answers)
    assert compare(own, again)["bit_for_bit"]
    said = [[7, 8, 9, 10], [11, 12, 13, 14]]
    other = converse(model, side=6, tokens=4, way=WAYS[way], say=said)
    assert other.answers == said
    assert torch.equal(other.logits[0][0], own.logits[0][0])  # nothing was said before it
    assert not torch.equal(other.logits[0][1], own.logits[0][1])
    with pytest.raises(ValueError, match="different tokens"):
        compare(own, other)


def test_a_comparison_tells_where_and_by_how_little_choices_part() -> None:
    one = torch.zeros(4, 8)
    one[range(4), [1, 2, 3, 4]] = 5.0
    other = one.clone()
    one[2, 6], other[2, 6] = 4.75, 5.25  # a near-tie that falls the other way
    other[3, 0] = 3.0  # what comes later
    found = compare_turn(one, other)
    assert found["first_logits"] == {"relative_l2": 0.0, "difference": 0.0}
    assert found["first_different_token"] == {"step": 2, "margin": [0.25, 0.25], "moved": 0.5}
    assert found["until_different"]["difference"] == 0.5
    assert found["until_different"]["relative_l2"] == pytest.approx(0.5 / (25 + 4.75**2) ** 0.5)
    assert found["all_steps"] == {"relative_l2": pytest.approx(0.6), "difference": 3.0}
    assert found["different_tokens"] == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [False, True])
def test_the_bench_tells_a_fault_of_the_split_from_rounding(
    monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    def dispatch(model: Any, *args: Any, **kwargs: Any) -> Any:
        if fault:  # one weight arrives wrong
            next(model.model.visual.parameters()).data += 0.1
        return dispatch_model(model, *args, **kwargs)

    monkeypatch.setattr(wrappers, "dispatch_model", dispatch)
    found = wrappers.device_map(wrappers.Plan("qwen3_vl_small", "cpu", side=6, tokens=6))

    def largest(comparison: Any) -> float:
        return max(turn["all_steps"]["relative_l2"] for turn in comparison["turns"])

    assert found["weights_arrived"] is not fault
    assert all(comparison["bit_for_bit"] for comparison in found["again"].values())
    assert found["left_after_the_answer"]["background"][0] > 0
    rounding = largest(found["rounding"])
    assert 0 < rounding < 1e-5
    for comparison in found["split"].values():
        assert (largest(comparison) > 100 * rounding) is fault


def test_one_device_computes_and_copies_like_itself() -> None:
    found = two_cards.examine("cpu", "cpu", torch.float32)
    assert found["copies"] and found["peers"] is None
    assert all(all(found[name].values()) for name in ("linear", "attention"))
