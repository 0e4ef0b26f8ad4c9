"""Selection time in the report is the time that selection took."""

from __future__ import annotations

import time

import pytest
import torch

from raincheck_hf.bench.checkpoints import load
from raincheck_hf.bench.selectors_speed import measure_report
from raincheck_hf.tiny import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_report_agrees_with_an_outside_clock(name: str) -> None:
    model, processor = load(name)
    measured = measure_report(model, processor, "cpu", wanted_ms=150)
    assert measured["outside_ms"] >= 150
    assert measured["select_ms"] == pytest.approx(measured["outside_ms"], rel=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_report_agrees_with_an_outside_clock_on_a_gpu() -> None:
    model, processor = load(NAMES[0], "cuda")
    measured = measure_report(model, processor, "cuda", wanted_ms=150)
    assert measured["select_ms"] == pytest.approx(measured["outside_ms"], rel=0.1)


def test_the_clock_waits_for_nothing_on_a_cpu() -> None:
    from raincheck_hf.bench.selectors_speed import clock

    assert 20 <= clock("cpu", lambda: time.sleep(0.02)) < 200
