"""Follow-ups that come before completion is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from raincheck_hf.bench import gaps
from raincheck_hf.bench.gaps import Plan, read_intervals, run_gaps, waits
from raincheck_hf.cli import main


@pytest.fixture
def intervals(tmp_path: Path) -> Path:
    path = tmp_path / "intervals.txt"
    path.write_text('0.5\n{"seconds": 2}\n\n4e0\n1\n', encoding="utf-8")
    return path


def test_intervals_are_read_in_both_forms(intervals: Path) -> None:
    assert read_intervals(intervals) == [0.5, 2.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nsoon\n", "line 2: 'soon'"),
        ("1\n-1\n", "line 2"),
        ("nan\n", "line 1"),
        ('{"gap": 1}\n', "line 1"),
        ("[1]\n", "line 1"),
        ("\n\n", "no intervals"),
    ],
)
def test_bad_intervals_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_intervals(path)


def test_waits_by_hand() -> None:
    found = waits([0.5, 2.0, 4.0, 1.0], pending=150, tokens_per_second=100)
    assert found["completion_s"] == pytest.approx(1.5)
    assert (found["follow_ups"], found["waiting"], found["share"]) == (4, 2, 0.5)
    assert found["wait_s"]["mean"] == pytest.approx(0.75)
    assert found["wait_s"]["max"] == pytest.approx(1.0)
    assert found["mean_s"] == pytest.approx(1.5 / 4)
    nobody = waits([2.0], pending=150, tokens_per_second=100)
    assert (nobody["waiting"], nobody["wait_s"], nobody["mean_s"]) == (0, None, 0)
    exactly = waits([1.5], pending=150, tokens_per_second=100)
    assert exactly["waiting"] == 0
    for pending, rate in ((-1, 1.0), (1, 0.0), (1, float("inf"))):
        with pytest.raises(ValueError, match="rate above 0"):
            waits([1.0], pending, rate)


def test_a_rate_is_measured_once(
    intervals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(intervals, models=("qwen3_vl",), size=(3, 4), pending=(0, 8))
    out = tmp_path / "rows.jsonl"
    rows = run_gaps(plan, out)
    assert [row["pending"] for row in rows] == [0, 8]
    assert rows[0]["rate"] == rows[1]["rate"] > 0
    assert rows[0]["waiting"] == 0
    before = out.read_bytes()
    monkeypatch.setattr(gaps, "measure_rate", None)
    assert run_gaps(plan, out) == rows and out.read_bytes() == before


def test_what_is_pending_by_default_is_what_was_deferred(intervals: Path) -> None:
    assert Plan(intervals, size=(12, 12), retention=0.3).waiting == (100,)


def test_the_command(intervals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "gaps", str(intervals), "--rate", "100", "--pending", "150", "--out"]
    assert main([*words, str(tmp_path / "rows.jsonl")]) == 0
    assert "2 of 4" in capsys.readouterr().out
    assert main([*words[:2], str(tmp_path / "missing.txt")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main([*words[:4], "-1", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "above 0" in capsys.readouterr().err
