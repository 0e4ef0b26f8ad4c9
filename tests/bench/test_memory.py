"""Bytes by component: nothing twice, nothing missing, and what pruning and restoring change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raincheck_hf.bench.live import COMPONENTS, live_bytes
from raincheck_hf.bench.memory import Plan, run_memory
from raincheck_hf.cache import RaincheckCache
from raincheck_hf.cli import main
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.generation import enable_raincheck
from raincheck_hf.tiny import load

CONFIG = RaincheckConfig(selector="uniform", guard_tokens=2, chunk_size=7, completion="lazy")
SMALL = Plan(size=(8, 10), tokens=12, config=CONFIG)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("memory") / "rows.jsonl"
    return out, run_memory(SMALL, out)


def test_an_empty_conversation_holds_weights_alone(architecture: str) -> None:
    model = enable_raincheck(load(architecture)[0])
    held = live_bytes(model, RaincheckCache(model))
    tied = {weight.data_ptr(): weight.nbytes for weight in [*model.parameters(), *model.buffers()]}
    assert held == {**dict.fromkeys(COMPONENTS, 0), "weights": sum(tied.values())}


def test_components_follow_from_shapes(measured: tuple[Path, list[dict]]) -> None:
    rows = {(row["model"], row["way"]): row for row in measured[1]}
    for model, layers in (("qwen3_vl", 4), ("qwen3_5", 2)):
        full, hard, rain = (rows[model, way] for way in ("full", "hard", "raincheck"))
        slot = layers * 2 * 2 * 64 * 4  # keys and values, two heads of 64, fp32
        for row in (full, hard, rain):
            assert row["steady"]["kv"] % (slot * 64) == 0
            assert row["steady"]["staged"] == row["steady"]["maps"] == 0
        assert hard["steady"]["kv"] < full["steady"]["kv"] == rain["steady"]["kv"]
        # 56 rows of 256 wait, with positions and the like; on Qwen3-VL also two DeepStack layers.
        waiting = 56 * 256 * 4 * (3 if model == "qwen3_vl" else 1)
        assert waiting <= rain["largest"]["staged"] <= waiting * 1.05
        assert full["largest"]["staged"] == hard["largest"]["staged"] == 0
    state = 6 * 64 * 64 * 4
    assert rows["qwen3_vl", "raincheck"]["largest"]["recurrent"] == 0
    rain = rows["qwen3_5", "raincheck"]
    assert rain["largest"]["maps"] == 2 * state  # Φ of two layers is as large as their states
    assert rain["largest"]["recurrent"] > rows["qwen3_5", "full"]["largest"]["recurrent"]


def test_what_is_measured_once_stays(measured: tuple[Path, list[dict]], tmp_path: Path) -> None:
    out, rows = measured
    before = out.read_bytes()
    assert run_memory(SMALL, out) == rows and out.read_bytes() == before
    again = run_memory(SMALL, tmp_path / "rows.jsonl")
    for one, other in zip(rows, again, strict=True):
        for when in ("peak", "largest", "steady"):
            assert one[when] == other[when]


def test_a_tensor_counts_once() -> None:
    model = torch.nn.Linear(4, 4)
    model.twin = model.weight  # tied
    nothing = type("Nothing", (), {"buffers": {}, "conversation": None, "broken_off": None})()
    assert live_bytes(model, nothing)["weights"] == (16 + 4) * 4


def test_bad_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="lazy"):
        Plan(config=RaincheckConfig())
    with pytest.raises(ValueError, match="no checkpoint"):
        Plan(models=("no/such",))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    words = f"bench memory --arch qwen3_vl --size 3 4 --tokens 3 --out {out}"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "raincheck, peak" in printed and "staged" in printed
    assert len(out.read_text("utf-8").splitlines()) == 3
