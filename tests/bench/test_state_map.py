"""The suffix-map diagnostic: that it measures the join, and would notice a broken one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raincheck_hf.bench import state_map
from raincheck_hf.bench.recorded import Recorded, record
from raincheck_hf.bench.state_map import PLAIN, MapKernels, Plan, run_state_map
from raincheck_hf.bench.stopwatch import microseconds, spread
from raincheck_hf.bench.subjects import load_subject
from raincheck_hf.cli import main

SHORT = Plan(suffixes=(8, 40), length=160, runs=1)


@pytest.fixture(scope="module")
def layers() -> dict[int, Recorded]:
    return record(load_subject("qwen3_5", "cpu", "float32"), 160, seed=0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("map") / "rows.jsonl"
    return out, run_state_map(SHORT, out)


def test_streams_are_bf16_with_fp32_states(layers: dict[int, Recorded]) -> None:
    assert list(layers) == [0, 2]
    for layer in layers.values():
        inputs, g, beta = layer.factors.inputs, layer.factors.g, layer.factors.beta
        assert (inputs.dtype, g.dtype, beta.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert inputs.shape[1] == len(g) == len(beta) == 160
        assert layer.replayed(layer.beginning(), layer.part(0, 5)).state.dtype == torch.float32


def test_a_replay_is_the_model_own_rule(layers: dict[int, Recorded]) -> None:
    """States from the recorded stream are those of the model's mixer on the same rows."""
    subject = load_subject("qwen3_5", "cpu", "float32")
    from transformers import DynamicCache

    stream = subject.stream(160, seed=0)
    cache = DynamicCache(config=subject.model.config.get_text_config())
    seen: dict[int, torch.Tensor] = {}
    stock = type(cache).update_recurrent_state

    def keep(self, state, layer, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen[layer] = state[0].float()
        return stock(self, state, layer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(cache), "update_recurrent_state", keep)
        subject.model.model(**stream, cache=cache, use_cache=True)
    length = stream["input_ids"].shape[1]
    with torch.no_grad():
        for index, layer in record(subject, length, seed=0).items():
            end = layer.replayed(layer.beginning(), layer.part(0, length)).state
            off = (end - seen[index]).norm() / seen[index].norm()
            assert off < 0.02  # bf16 inputs here, fp32 there


def test_the_join_is_as_good_as_the_replay(measured: tuple[Path, list[dict]]) -> None:
    _, rows = measured
    assert [(row["layer"], row["suffix"]) for row in rows] == [(0, 8), (0, 40), (2, 8), (2, 40)]
    for row in rows:
        assert row["error"] < 1e-5 and row["replay_error"] < 1e-5
        assert row["unjoined"] > 1e-2  # there was something to join
        assert row["map_bytes"] == 6 * 64 * 64 * 4
        assert 0 < row["norm"]["mean"] <= row["norm"]["largest"] <= 1 + 1e-5
        assert len(row["prefixes"]) == 4 and row["prefixes"][-1] == 160 - row["suffix"]
        assert {"token_us", "join_us", "replay_us"} <= row.keys()


@pytest.mark.parametrize(
    "broken",
    [
        replace(PLAIN, join=lambda live, phi, moved, before: live),
        replace(PLAIN, step=lambda phi, k, g, beta: phi),
        replace(PLAIN, step=lambda phi, k, g, beta: PLAIN.step(phi, k, g, beta * 0.9)),
    ],
)
def test_a_broken_kernel_is_noticed(layers: dict[int, Recorded], broken: MapKernels) -> None:
    found = state_map.measure(layers[2], 40, broken, "cpu", runs=1)
    assert found["error"] > 1e-3


def test_the_same_seed_gives_the_same_numbers(
    measured: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    out, rows = measured
    before = out.read_bytes()
    assert run_state_map(SHORT, out) == rows and out.read_bytes() == before
    fields = ("error", "replay_error", "unjoined", "norm", "prefixes")
    again = run_state_map(SHORT, tmp_path / "rows.jsonl")
    for one, other in zip(rows, again, strict=True):
        assert {name: one[name] for name in fields} == {name: other[name] for name in fields}
    other_seed = run_state_map(replace(SHORT, seed=1), tmp_path / "rows.jsonl")
    assert other_seed[0]["norm"] != rows[0]["norm"]


def test_bad_plans_are_refused() -> None:
    for wrong, message in [
        ({"suffixes": (3,)}, "4 to"),
        ({"suffixes": (5000,)}, "4 to 4092"),
        ({"model": "no/such"}, "no checkpoint"),
        ({"device": "cuda:99"}, "not there"),
    ]:
        with pytest.raises(ValueError, match=message):
            Plan(**wrong)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    words = f"bench state-map --suffixes 8 --length 64 --runs 1 --out {out}"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "join error" in printed and "98,304 bytes" in printed
    assert json.loads(out.read_text("utf-8").splitlines()[0])["bench"] == "state_map"
    assert main([*words.split(), "--model", "qwen3_vl"]) == 2
    assert "no recurrent layers" in capsys.readouterr().err


def test_times_have_a_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"p20": 1.0, "p50": 2.0, "p80": 2.0}
    calls: list[int] = []
    times = microseconds(lambda: calls.append(1), "cpu", runs=4, share=2)
    assert len(calls) == 5 and 0 < times["p20"] <= times["p50"] <= times["p80"]
