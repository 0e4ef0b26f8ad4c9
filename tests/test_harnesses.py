"""Evaluation harnesses, each as its package installs it, on a small model and a local task."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_boards import PRUNED, board_of, questions_of

from raincheck_hf import RaincheckConfig, RaincheckSession
from raincheck_hf.harness.loading import load
from raincheck_hf.tiny import folder as checkpoint_of
from raincheck_hf.tiny.boards import Board

HOW = "docs/evaluation.md says how to install it"
needs_lmms_eval = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason=f"lmms-eval is not installed: {HOW}"
)
needs_vlmeval = pytest.mark.skipif(
    importlib.util.find_spec("vlmeval") is None, reason=f"VLMEvalKit is not installed: {HOW}"
)
# -- lmms-eval --------------------------------------------------------------------------------

UTILS = """
from PIL import Image


def visual(doc):
    return [Image.open(doc["picture"])]


def question(doc, lmms_eval_specific_kwargs=None, previous_output=None, round_idx=None,
             previous_round_info=None):
    if round_idx is None:
        return doc["questions"][0]
    if round_idx == len(doc["questions"]):
        return None, None, True, previous_output, None
    return [], doc["questions"][round_idx], False, previous_output, None


def one(doc, results):
    return {"right": float(results[0] == doc["answers"][0])}


def rounds(doc, results):
    pairs = list(zip(results[0], doc["answers"], strict=True))
    return {"right": sum(said == truth for said, truth in pairs) / len(pairs)}
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_visual: !function boards_utils.visual
doc_to_text: !function boards_utils.question
doc_to_target: "answers"
process_results: !function boards_utils.{score}
generation_kwargs: {{max_new_tokens: 12, temperature: 0}}
metric_list:
  - {{metric: right, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
PROGRAM = """
import json, sys
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.tasks import TaskManager

folder, runs, out = sys.argv[1:]
manager = TaskManager(include_path=folder, include_defaults=False)
found = {}
for name, run in json.loads(runs).items():
    done = simple_evaluate(**run, task_manager=manager, log_samples=True, bootstrap_iters=0)
    found[name] = {key: done.get(key) for key in ("results", "samples", "throughput")}
with open(out, "w") as file:
    json.dump(found, file, default=str)
"""


def write_documents(folder: Path, boards: Sequence[Board]) -> list[dict[str, Any]]:
    """Documents about boards: a picture, questions and answers."""
    documents = []
    for number, board in enumerate(boards):
        picture = folder / f"board{number}.png"
        board.image().save(picture)
        questions, answers = zip(*questions_of(board), strict=True)
        documents.append(
            {"picture": str(picture), "questions": list(questions), "answers": list(answers)}
        )
    return documents


def in_another_process(program: list[str], folder: Path, **environment: str) -> str:
    """Harnesses patch what they import; here they do it to themselves alone."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [sys.executable, *program], cwd=folder, capture_output=True, text=True, check=False,
        timeout=1100, env={**os.environ, **offline, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def lmms_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A local task of each kind, run in every mode; by run, what lmms-eval reports."""
    folder = tmp_path_factory.mktemp("lmms")
    documents = write_documents(folder, [board_of(number) for number in range(2)])
    data = folder / "boards.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents), encoding="utf-8")
    (folder / "boards_utils.py").write_text(UTILS, encoding="utf-8")
    for kind, score in (("generate_until", "one"), ("generate_until_multi_round", "rounds")):
        task = TASK.format(name=f"boards_{score}", data=data, kind=kind, score=score)
        (folder / f"boards_{score}.yaml").write_text(task, encoding="utf-8")
    common = "pretrained=qwen3_vl,device=cpu,dtype=float32,system_prompt="
    pruned = ",".join(f"{name}={value}" for name, value in PRUNED.items())

    def run(arguments: str, *scores: str, model: str = "raincheck_qwen", **more: Any) -> Any:
        tasks = [f"boards_{score}" for score in scores]
        return {"model": model, "model_args": arguments, "tasks": tasks, **more}

    kept = {"use_cache": str(folder / "responses")}
    runs = {
        "raincheck": run(f"{common},{pruned}", "one", "rounds", **kept),
        "again": run(f"{common},{pruned}", "one", "rounds", **kept),
        "hard": run(f"{common},{pruned},mode=hard", "one", "rounds"),
        "full": run(f"{common},mode=full", "one", "rounds"),
        "apart": run(f"{common},{pruned},rounds=apart", "rounds"),
    }
    if importlib.util.find_spec("decord"):  # lmms-eval's own model cannot be imported without
        bf16 = "pretrained=qwen3_vl,mode=full,device=cpu,dtype=bfloat16"
        own = f"pretrained={checkpoint_of('qwen3_vl')},device=cpu,device_map=cpu"
        runs |= {"bf16": run(bf16, "one"), "own": run(own, "one", model="qwen3_vl")}
    out = folder / "found.json"
    in_another_process(["-c", PROGRAM, str(folder), json.dumps(runs), str(out)], folder)
    return json.loads(out.read_text(encoding="utf-8"))


def right(run: dict[str, Any], score: str) -> float:
    return run["results"][f"boards_{score}"]["right,none"]


def answers(run: dict[str, Any], score: str) -> list[Any]:
    return [sample["filtered_resps"][0] for sample in run["samples"][f"boards_{score}"]]


@needs_lmms_eval
@pytest.mark.timeout(1200)  # the first of these tests runs all modes
def test_lmms_eval_runs_one_turn_and_many(lmms_runs: dict[str, Any]) -> None:
    assert right(lmms_runs["full"], "one") == right(lmms_runs["full"], "rounds") == 1
    # A row at 30 % of the tokens is misread. What follows is asked when all is restored.
    assert right(lmms_runs["raincheck"], "one") == 0
    assert right(lmms_runs["raincheck"], "rounds") == 0.75
    assert right(lmms_runs["hard"], "rounds") < 0.5


@needs_lmms_eval
@pytest.mark.timeout(1200)
def test_lmms_eval_answers_are_those_of_one_cache(lmms_runs: dict[str, Any]) -> None:
    model, processor = load("qwen3_vl", "float32")
    config = RaincheckConfig(**PRUNED, completion="lazy")
    for number, said in enumerate(answers(lmms_runs["raincheck"], "rounds")):
        board = board_of(number)
        session = RaincheckSession(model, processor, config)
        expected = [
            session.ask(question, images=[] if turn else [board.image()], max_new_tokens=12)
            for turn, (question, _) in enumerate(questions_of(board))
        ]
        assert said == expected
        session.close()


@needs_lmms_eval
@pytest.mark.timeout(1200)
def test_lmms_eval_logs_figures_with_its_samples(lmms_runs: dict[str, Any]) -> None:
    run = lmms_runs["raincheck"]
    for sample in run["samples"]["boards_one"]:
        (figures,) = sample["token_counts"]
        assert figures["ttft_ms"] > 0 and figures["tpot_ms"] > 0
        assert figures["restored_fraction"] == figures["restored_in_answer"] / 44 > 0
    for sample in run["samples"]["boards_rounds"]:
        (figures,) = sample["token_counts"]
        assert [one["n_visual"] for one in figures["rounds"]] == [64, 0, 0, 0]
        lengths = [one["input_tokens"] for one in figures["rounds"]]
        assert lengths == sorted(lengths) and len(set(lengths)) == 4  # one conversation grows
        assert figures["output_tokens"] == sum(one["output_tokens"] for one in figures["rounds"])
    hard, full = ((lmms_runs[name]["samples"]["boards_one"]) for name in ("hard", "full"))
    assert {one["token_counts"][0]["restored_fraction"] for one in hard} == {0}
    assert {one["token_counts"][0]["restored_fraction"] for one in full} == {None}
    assert {"avg_ttft_ms", "avg_tpot_ms", "avg_restored_fraction"} <= set(run["throughput"])


@needs_lmms_eval
@pytest.mark.timeout(1200)
def test_lmms_eval_keeps_responses(lmms_runs: dict[str, Any]) -> None:
    """Its response cache gives the same answers again, and no figures: it keeps text alone."""
    for score in ("one", "rounds"):
        assert answers(lmms_runs["again"], score) == answers(lmms_runs["raincheck"], score)
        samples = lmms_runs["again"]["samples"][f"boards_{score}"]
        assert [sample["token_counts"] for sample in samples] == [[None], [None]]


@needs_lmms_eval
@pytest.mark.timeout(1200)
def test_lmms_eval_rounds_apart_know_nothing_of_each_other(lmms_runs: dict[str, Any]) -> None:
    for said, sample in zip(
        answers(lmms_runs["apart"], "rounds"),
        lmms_runs["apart"]["samples"]["boards_rounds"],
        strict=True,
    ):
        assert said[0] in answers(lmms_runs["raincheck"], "one")
        lengths = [one["input_tokens"] for one in sample["token_counts"][0]["rounds"]]
        assert max(lengths[1:]) < 64 < lengths[0]  # no picture in the later ones


@needs_lmms_eval
@pytest.mark.timeout(1200)
def test_lmms_eval_full_mode_answers_as_its_own_model(lmms_runs: dict[str, Any]) -> None:
    if "own" not in lmms_runs:
        pytest.skip("lmms-eval's qwen3_vl needs decord, which is not installed")
    assert answers(lmms_runs["bf16"], "one") == answers(lmms_runs["own"], "one")


@needs_lmms_eval
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("retention=1.5", "retention"),
        ("selektor=mmtok", "selektor"),
        ("rounds=both", "conversation, apart"),
        ("batch_size=2", "one sequence at a time"),
        ("mode=full,retention=0.5", "mode=full means"),
    ],
)
@pytest.mark.timeout(600)
def test_lmms_eval_model_arguments_are_refused(arguments: str, message: str) -> None:
    module = pytest.importorskip("raincheck_hf.harness.lmms_eval")
    with pytest.raises(ValueError, match=message):
        module.RaincheckQwen.create_from_arg_string(f"pretrained=qwen3_vl,{arguments}")


# -- VLMEvalKit -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vlmeval_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local file of dialogues, and one of single questions, by VLMEvalKit's own runner."""
    import pandas as pd

    folder = tmp_path_factory.mktemp("vlmeval")
    documents = write_documents(folder, [board_of(number) for number in range(2)])
    talks = [
        {
            "index": number,
            "image_path": one["picture"],
            "question": [f"<ImageHere>{one['questions'][0]}", *one["questions"][1:]],
            "answer": one["answers"],
        }
        for number, one in enumerate(documents)
    ]
    pd.DataFrame(talks).to_csv(folder / "board_talks.tsv", sep="\t", index=False)
    root = folder / "LMUData"
    root.mkdir()
    single = [
        {"index": number, "image_path": one["picture"], "question": one["questions"][0],
         "answer": one["answers"][0]}
        for number, one in enumerate(documents)
    ]  # fmt: skip
    pd.DataFrame(single).to_csv(root / "boards_openended.tsv", sep="\t", index=False)
    pruned = ",".join(f"{name}={value}" for name, value in PRUNED.items())
    given = "pretrained=qwen3_vl,device=cpu,dtype=float32,max_new_tokens=12,use_custom_prompt=false"
    own = ["-m", "raincheck_hf.harness.vlmeval", "--model-args", f"{given},{pruned}"]
    paths = {"LMUData": str(root), "PRED_FORMAT": "tsv"}
    for name, data, more in (
        ("talks", "board_talks.tsv", []),
        ("single", "boards_openended", ["--mode", "infer"]),  # nothing scores a custom file
    ):
        options = ["--model", name, "--data", data, "--work-dir", "out", *more]
        in_another_process([*own, *options], folder, **paths)
    return folder / "out"


def figures_file(run: Path, name: str) -> list[dict[str, Any]]:
    text = (run / name / "figures.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@needs_vlmeval
@pytest.mark.timeout(1200)
def test_vlmeval_dialogues_go_on_on_one_cache(vlmeval_run: Path) -> None:
    status = json.loads((vlmeval_run / "talks" / "status.json").read_text(encoding="utf-8"))
    found = status["datasets"]["board_talks"]["metrics"]
    assert found == {"Overall": 75, "turn 1": 0, "turn 2": 100, "turn 3": 100, "turn 4": 100}
    rows = figures_file(vlmeval_run, "talks")
    assert [(row["dialogue"], row["turn"]) for row in rows] == [
        (dialogue, turn) for dialogue in (1, 2) for turn in (1, 2, 3, 4)
    ]
    model, processor = load("qwen3_vl", "float32")
    config = RaincheckConfig(**PRUNED, completion="lazy")
    for number in range(2):
        board, session = board_of(number), RaincheckSession(model, processor, config)
        for turn, (question, _) in enumerate(questions_of(board)):
            row = rows[4 * number + turn]
            image = [] if turn else [board.image()]
            assert row["question"] == question and len(row["media"]) == len(image)
            assert row["answer"] == session.ask(question, images=image, max_new_tokens=12)
            # One picture is encoded once; later turns bring none.
            assert row["n_visual"] == 64 * len(image)
            assert row["ttft_ms"] > 0
        session.close()
    assert all(0 < row["restored_fraction"] < 1 for row in rows[::4])


@needs_vlmeval
@pytest.mark.timeout(1200)
def test_vlmeval_single_questions(vlmeval_run: Path) -> None:
    rows, talks = (figures_file(vlmeval_run, name) for name in ("single", "talks"))
    assert [row["answer"] for row in rows] == [row["answer"] for row in talks[::4]]
    assert {row["turn"] for row in rows} == {1}
