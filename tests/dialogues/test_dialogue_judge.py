"""The judge: an endpoint with all its moods, and verdicts that are kept, whatever happens."""

from __future__ import annotations

import base64
import json
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_endpoint import Reply, serving

from raincheck_hf.bench.dialogues.boards import board_dialogues
from raincheck_hf.bench.dialogues.endpoint import Endpoint, EndpointError
from raincheck_hf.bench.dialogues.format import JUDGED, write_dialogues
from raincheck_hf.bench.dialogues.judge import BadVerdict, Prompts, verdict
from raincheck_hf.bench.dialogues.plan import KEY
from raincheck_hf.bench.rows import RowFile
from raincheck_hf.cli import main

KEY_OF_THE_USER = "sk-very-secret-123"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub is on this machine, whatever stands between it and others."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def endpoint(url: str, **more: Any) -> Endpoint:
    return Endpoint(url, "judge", **{"backoff": 0.01, "retries": 3, "timeout": 5.0, **more})


# The endpoint.


def test_a_request_is_what_the_protocol_asks_for() -> None:
    with serving(lambda number, prompt: Reply("fine")) as stub:
        assert endpoint(stub.url, key=f" {KEY_OF_THE_USER}\n").reply("How is it?") == "fine"
        assert endpoint(stub.url + "/chat/completions").reply("And now?") == "fine"
    (path, headers, body), (same, without, _) = stub.requests
    assert path == same == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY_OF_THE_USER}"
    assert "Authorization" not in without
    assert body == {
        "model": "judge",
        "messages": [{"role": "user", "content": "How is it?"}],
        "temperature": 0,
    }


@pytest.mark.parametrize(
    "first",
    [
        Reply(status=500),
        Reply(status=503, body=b"<html>busy</html>"),
        Reply(status=429, headers={"Retry-After": "0"}),
        Reply(hang_up=True),
        Reply(delay=1.0),
        Reply(body=b"no json"),
        Reply(body=b'{"choices": []}'),
        Reply(body=b'{"choices": [{"message": {"content": null}}]}'),
        Reply(text="  "),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again(first: Reply) -> None:
    with serving(lambda number, prompt: first if number < 2 else Reply("at last")) as stub:
        assert endpoint(stub.url, timeout=0.3).reply("?") == "at last"
        assert len(stub.requests) == 3


def test_the_wait_grows_and_is_the_servers_where_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    # The stub's own sleep is of no seconds; only the client's waits are looked at.
    answers = [Reply(status=500), Reply(status=429, headers={"Retry-After": "7"}),
               Reply(status=429, headers={"Retry-After": "3600"}),
               Reply(status=500, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
               Reply("yes")]  # fmt: skip
    with serving(lambda number, prompt: answers[number]) as stub:
        assert endpoint(stub.url, backoff=1.0, retries=4).reply("?") == "yes"
    assert [wait for wait in waits if wait] == [1.0, 7.0, 60.0, 8.0]


def test_it_gives_up_and_says_why() -> None:
    with serving(lambda number, prompt: Reply(status=502, body=b"bad gateway")) as stub:
        with pytest.raises(EndpointError, match=r"after 3 attempt.*HTTP 502.*bad gateway"):
            endpoint(stub.url, retries=2).reply("?")
        assert len(stub.requests) == 3
    with pytest.raises(EndpointError, match="after 1 attempt.*refused"):
        endpoint(stub.url, retries=0).reply("?")  # nobody listens any more


@pytest.mark.parametrize("status", [400, 401, 403, 404, 301, 307])
def test_what_will_not_pass_is_not_tried_again(status: int) -> None:
    with serving(lambda number, prompt: Reply("stolen")) as elsewhere:
        away = {"Location": elsewhere.url}
        with serving(lambda number, prompt: Reply(status=status, headers=away)) as stub:
            with pytest.raises(EndpointError, match=f"HTTP {status}"):
                endpoint(stub.url, key=KEY_OF_THE_USER).reply("?")
            assert len(stub.requests) == 1
    assert not elsewhere.requests


def test_a_key_is_in_no_message() -> None:
    echo = f"you sent {KEY_OF_THE_USER}"
    replies = [Reply(echo), Reply(status=401, body=echo.encode())]
    with serving(lambda number, prompt: replies[number]) as stub:
        one = endpoint(stub.url, key=KEY_OF_THE_USER)
        assert one.reply("?") == "you sent ***"
        with pytest.raises(EndpointError) as told:
            one.reply("?")
    assert KEY_OF_THE_USER not in str(told.value) + repr(one)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"url": "ftp://x/v1"}, "must be http"),
        ({"url": "localhost:8000"}, "must be http"),
        ({"url": "http://me:secret@x/v1"}, "without user, password"),
        ({"url": "http://x/v1?key=secret"}, "without user, password and query"),
        ({"key": "two words"}, "blanks"),
        ({"key": "ключ"}, "letters"),
        ({"timeout": 0}, "more than 0"),
        ({"retries": -1}, "0 or more"),
    ],
)
def test_an_endpoint_is_checked(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as told:
        Endpoint(**{"url": "http://x/v1", "model": "judge", **arguments})
    assert "secret" not in str(told.value) and "two words" not in str(told.value)


# Verdicts.


CHECKS = [{"question": "Is it long?", "answer": "Yes"}, {"question": "Is it rude?", "answer": "No"}]


@pytest.mark.parametrize(
    ("scoring", "reply", "score"),
    [
        ("rating", '{"score": 7}', 0.7),
        ("reference", '```json\n{"reason": "ok {so} so", "score": 10}\n```', 1),
        ("rating", '<think>{"score": 1}, or rather</think> {"score": 2.5}', 0.25),
        ("rating", 'It is {good}. {"score": 0}', 0),
        ("checklist", '{"answers": ["Yes", "No"]}', 1),
        ("checklist", '{"answers": ["yes", " YES "]}', 0.5),
        ("checklist", '{"answers": ["no", "yes"]}', 0),
    ],
)
def test_what_a_reply_is_worth(scoring: str, reply: str, score: float) -> None:
    assert verdict({"scoring": scoring, "checklist": CHECKS}, reply) == score


@pytest.mark.parametrize(
    ("scoring", "reply"),
    [
        ("rating", "Seven."),
        ("rating", '{"score": 11}'),
        ("rating", '{"score": -1}'),
        ("rating", '{"score": "7"}'),
        ("rating", '{"score": true}'),
        ("rating", '{"score": NaN}'),
        ("rating", '{"score": 7'),
        ("rating", '{"answers": ["Yes", "No"]}'),
        ("checklist", '{"answers": ["Yes"]}'),
        ("checklist", '{"answers": ["Yes", "No", "No"]}'),
        ("checklist", '{"answers": ["Yes", "perhaps"]}'),
        ("checklist", '{"answers": "Yes"}'),
        ("checklist", '{"score": 7}'),
    ],
)
def test_a_reply_that_is_not_what_was_asked_for(scoring: str, reply: str) -> None:
    with pytest.raises(BadVerdict):
        verdict({"scoring": scoring, "checklist": CHECKS}, reply)


# Prompts.


def answer(turn: int, scoring: str, **more: Any) -> dict[str, Any]:
    return {
        "dialogue": "d", "digest": "1", "model": "m", "weights": "w", "dtype": "float32",
        "device": "cpu", "seed": 0, "max_new_tokens": 9, "retention": 1.0, "chunk_size": None,
        "guard_tokens": None, "selector": None, "way": "full", "turn": turn, "turns": 4,
        "question": f"question {turn}", "said": f"said {turn}", "reference": f"wanted {turn}",
        "scoring": scoring, "score": 1.0 if scoring == "exact" else None, "category": None,
        "context": "a cat", "images": [], "checklist": [], "n_visual": 0, "n_selected": 0,
        "selection": "-", "restored_in_answer": 0, "versions": {}, "commit": None, **more,
    }  # fmt: skip


ANSWERS = [
    answer(1, "checklist", checklist=CHECKS, images=["cat.png"]),
    answer(2, "exact"),
    answer(3, "reference", said="costs $5, ${answer}"),
    answer(4, "rating", reference=None),
]


def test_prompts_hold_what_a_judge_needs() -> None:
    prompts = Prompts()
    first = prompts.render(ANSWERS[:1])
    assert "1. Is it long?\n2. Is it rude?" in first and "exactly 2\nentries" in first
    third = prompts.render(ANSWERS[:3])
    for part in ("a cat", "User: question 2\nAssistant: said 2", "wanted 3", "costs $5, ${answer}"):
        assert part in third
    assert "question 4" not in third and "wanted 2" not in third
    assert "wanted" not in prompts.render(ANSWERS)


def test_prompts_are_in_the_package() -> None:
    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    (pattern,) = data["package-data"]["raincheck_hf.bench.dialogues"]
    found = (root / "raincheck_hf" / "bench" / "dialogues").glob(pattern)
    assert sorted(path.stem for path in found) == sorted(JUDGED)


def test_prompts_of_the_users_own(tmp_path: Path) -> None:
    for scoring in JUDGED:
        (tmp_path / f"{scoring}.md").write_text("Is $answer good? It costs 1 $$.")
    own = Prompts(tmp_path)
    assert own.render(ANSWERS[:1]) == "Is said 1 good? It costs 1 $."
    assert own.digest("rating") != Prompts().digest("rating")
    for text, says in (("$awnser", "awnser is no placeholder"), ("1 $.", "written \\$\\$")):
        (tmp_path / "rating.md").write_text(text)
        with pytest.raises(ValueError, match=says):
            Prompts(tmp_path)
    (tmp_path / "rating.md").unlink()
    with pytest.raises(ValueError, match=r"no prompt rating\.md"):
        Prompts(tmp_path)


# The command.


def good(number: int, prompt: str) -> Reply:
    return Reply('{"answers": ["Yes", "Yes"]}' if "Is it long?" in prompt else '{"score": 8}')


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    RowFile(path, KEY).append(ANSWERS)
    return path


def judge(rows: Path, url: str, *more: str) -> int:
    out = rows.with_name("verdicts.jsonl")
    command = ["bench", "judge", "--rows", str(rows), "--url", url, "--judge-model", "judge"]
    return main([*command, "--out", str(out), "--retries", "1", *more])


def verdicts(rows: Path) -> dict[int, float]:
    lines = rows.with_name("verdicts.jsonl").read_text().splitlines()
    return {one["turn"]: one["score"] for one in map(json.loads, lines)}


def test_answers_are_judged_once(
    rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY_OF_THE_USER)
    before = rows.read_text()
    echoing: Callable[[int, str], Reply] = lambda number, prompt: Reply(  # noqa: E731
        f"{KEY_OF_THE_USER} {good(number, prompt).text}"
    )
    with serving(echoing) as stub:
        assert judge(rows, stub.url, "--api-key-env", "MY_KEY") == 0
        assert verdicts(rows) == {1: 0.5, 3: 0.8, 4: 0.8}
        keys = [headers["Authorization"] for _, headers, _ in stub.requests]
        assert keys == [f"Bearer {KEY_OF_THE_USER}"] * 3
        kept = rows.with_name("verdicts.jsonl").read_text()
        assert judge(rows, stub.url, "--api-key-env", "MY_KEY") == 0
        assert len(stub.requests) == 3
        # Pictures shown or not are different questions.
        picture = b"\x89PNG not looked into"
        rows.with_name("cat.png").write_bytes(picture)
        more = ("--media", str(rows.parent), "--api-key-env", "MY_KEY")
        assert judge(rows, stub.url, *more) == 0
        assert len(stub.requests) == 6
    assert rows.with_name("verdicts.jsonl").read_text().startswith(kept)
    assert rows.read_text() == before
    shown = [body["messages"][0]["content"][1] for _, _, body in stub.requests[3:]]
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    assert shown == [{"type": "image_url", "image_url": {"url": url}}] * 3
    printed = capsys.readouterr()
    assert "3 answers to judge, 3 of them already" in printed.out
    assert "0.775" in printed.out  # the mean of 0.5, 1, 0.8, 0.8
    everything = [path.read_text() for path in rows.parent.iterdir() if path.suffix != ".png"]
    assert KEY_OF_THE_USER not in printed.out + printed.err + "".join(everything)


def test_unusable_replies_are_asked_about_again(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def moody(number: int, prompt: str) -> Reply:
        return Reply("I would rather not.") if "wanted 3" in prompt else good(number, prompt)

    with serving(moody) as stub:
        assert judge(rows, stub.url) == 0
        assert verdicts(rows) == {1: 0.5, 4: 0.8}
        assert len(stub.requests) == 4  # one of them twice
    printed = capsys.readouterr()
    assert "no verdict on 'd', turn 3, full" in printed.err
    assert "1 answers got no usable verdict" in printed.out
    assert "no dialogue is answered and scored as a whole" in printed.out
    with serving(good) as stub:
        assert judge(rows, stub.url) == 0
        assert len(stub.requests) == 1
    assert verdicts(rows) == {1: 0.5, 3: 0.8, 4: 0.8}


def test_verdicts_until_a_failure_are_kept(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(number: int, prompt: str) -> Reply:
        return good(number, prompt) if number < 2 else Reply(status=401, body=b"no credit")

    with serving(failing) as stub:
        assert judge(rows, stub.url, "--workers", "1") == 2
    error = capsys.readouterr().err
    assert "HTTP 401" in error and "no credit" in error and "verdicts so far" in error
    assert len(verdicts(rows)) == 2
    # As a kill would leave it: half a line.
    out = rows.with_name("verdicts.jsonl")
    out.write_bytes(out.read_bytes()[:-9])
    with serving(good) as stub:
        assert judge(rows, stub.url) == 0
        assert len(stub.requests) == 2
    assert {one["turn"]: one["score"] for one in RowFile(out, ("turn",))} == {
        1: 0.5, 3: 0.8, 4: 0.8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--url", "nowhere"], "must be http"),
        (["--rows", "none.jsonl"], "no such file"),
        (["--prompts", "none"], "no prompt checklist.md"),
        (["--timeout", "0"], "more than 0"),
        (["--media", "none"], "cannot be read"),
    ],
)
def test_bad_arguments(
    rows: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(good) as stub:
        assert judge(rows, stub.url, "--workers", "1", *more) == 2
    assert says in capsys.readouterr().err


def test_a_file_without_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "rows.jsonl"
    empty.write_text("{}\n")
    assert judge(empty, "http://127.0.0.1:1/v1") == 2
    assert "holds no answers" in capsys.readouterr().err


def test_from_dialogues_to_recovery(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model answers, the judge scores, and the table has it; the stub knows the truth."""
    data, rows = tmp_path / "data.jsonl", tmp_path / "rows.jsonl"
    boards = board_dialogues(data, 2, turns=4, size=(6, 6))
    asked = [
        replace(one, turns=tuple(replace(turn, scoring="reference") for turn in one.turns))
        for one in boards
    ]
    write_dialogues(data, asked)
    threads = torch.get_num_threads()
    try:
        command = ["bench", "dialogues", "--data", str(data), "--selector", "uniform"]
        assert main([*command, "--out", str(rows)]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "24 answers wait for a judge" in printed
    assert "no dialogue is answered and scored as a whole" in printed

    def compare(number: int, prompt: str) -> Reply:
        wanted = prompt.partition("written by people:\n")[2][0]
        given = prompt.partition("which you grade:\n")[2][0]
        return Reply(json.dumps({"reason": "-", "score": 10 * (wanted == given)}))

    with serving(compare) as stub:
        assert judge(rows, stub.url) == 0
        assert len(stub.requests) == 24
    figures = json.loads((tmp_path / "verdicts.summary.json").read_text())
    for way in ("full", "hard", "raincheck"):
        own = [row for row in RowFile(rows, KEY) if row["way"] == way]
        right = sum(row["said"][:1] == row["reference"] for row in own) / len(own)
        (line,) = [one for one in figures if (one["way"], one["span"]) == (way, "all turns")]
        assert line["score"]["point"] == pytest.approx(right) and line["dialogues"] == 2
