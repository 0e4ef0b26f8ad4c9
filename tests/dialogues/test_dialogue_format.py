"""The data format: what is read is what was written, and faults are told with their place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raincheck_hf.bench.dialogues.format import (
    SCORINGS,
    Check,
    Dialogue,
    Turn,
    read_dialogues,
    write_dialogues,
)
from raincheck_hf.bench.dialogues.scoring import own_score

WHOLE = Dialogue(
    id="shop",
    system="Answer briefly.",
    context="A shop window with two clocks.",
    category="shopping",
    seed=7,
    turns=(
        Turn(
            question="Which clock is later?\u2028Look twice.",
            images=("a.png", "b/c.png"),
            videos=(("a.png", "b/c.png"), ("b/c.png", "a.png")),
            reference="the left one",
            scoring="exact",
            category="time",
            max_new_tokens=8,
        ),
        Turn(
            question="Say why.",
            reference="Its hands are at noon.",
            scoring="checklist",
            checklist=(Check("Does it name the hands?", category="facts"), Check("Rude?", "No")),
        ),
        Turn(question="And the video?", videos=("film.mp4",)),
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    for name in ("a.png", "b/c.png", "film.mp4"):
        (tmp_path / name).touch()
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    path = folder / "data.jsonl"
    other = Dialogue(id="other", turns=(Turn(question="?"),))
    assert write_dialogues(path, [WHOLE, other]) == 2
    assert read_dialogues(path) == [WHOLE, other]
    # Defaults are not written, so that a file says what its author said.
    assert json.loads(path.read_text().split("\n")[1]) == {
        "id": "other",
        "turns": [{"question": "?", "scoring": "none"}],
    }


def test_a_file_is_never_overwritten(folder: Path) -> None:
    path = folder / "data.jsonl"
    path.write_text("mine")
    with pytest.raises(ValueError, match="there already"):
        write_dialogues(path, [WHOLE])
    assert path.read_text() == "mine"


def test_the_digest_changes_with_the_content() -> None:
    shorter = replace(WHOLE, turns=WHOLE.turns[:2])
    assert WHOLE.digest == replace(WHOLE).digest != shorter.digest


def test_scoring_follows_from_what_is_there(folder: Path) -> None:
    turns = [
        {"question": "a", "reference": "r"},
        {"question": "b", "checklist": [{"question": "q"}], "reference": "r"},
        {"question": "c"},
    ]
    path = folder / "data.jsonl"
    path.write_text("\n" + json.dumps({"id": "x", "turns": turns}) + "\n\n")
    (read,) = read_dialogues(path)
    assert [turn.scoring for turn in read.turns] == ["reference", "checklist", "none"]
    assert read.turns[1].checklist == (Check("q", "Yes"),)


GOOD: dict[str, Any] = {"id": "x", "turns": [{"question": "q"}]}


def turn(**fields: Any) -> dict[str, Any]:
    return {"id": "y", "turns": [{"question": "q"}, {"question": "q", **fields}]}


@pytest.mark.parametrize(
    ("plain", "field", "says"),
    [
        ({"turns": []}, "id", "is missing"),
        ({"id": 3, "turns": [{"question": "q"}]}, "id", "must be a text"),
        ({"id": "x", "turns": []}, "turns", "at least one turn"),
        ({"id": "x", "turns": {}}, "turns", "must be a list"),
        ({**GOOD, "sytem": "s"}, "sytem", "an unknown field; known are id, turns, system"),
        ({**GOOD, "seed": -1}, "seed", "0 or more; got -1"),
        ({"id": "x", "turns": ["q"]}, "turns[0]", "must be an object"),
        (turn(question=" "), "turns[1].question", "must be a text"),
        (turn(image="a.png"), "turns[1].image", "an unknown field"),
        (turn(images="a.png"), "turns[1].images", "must be a list"),
        (turn(images=["/a.png"]), "turns[1].images[0]", "relative to the data file"),
        (turn(images=["https://x/a.png"]), "turns[1].images[0]", "relative to the data file"),
        (turn(images=["b\\c.png"]), "turns[1].images[0]", "relative to the data file"),
        (turn(images=["a.png", "no.png"]), "turns[1].images[1]", "no such file"),
        (turn(videos=[["a.png"]]), "turns[1].videos[0]", "at least two; got 1"),
        (turn(videos=["film.mp4", ["a.png", "a.png"]]), "turns[1].videos", "all files or all"),
        (turn(reference=5), "turns[1].reference", "must be a text"),
        (turn(scoring="exactly"), "turns[1].scoring", "use one of exact, positions"),
        (turn(scoring="exact"), "turns[1].scoring", "needs a reference"),
        (turn(scoring="checklist"), "turns[1].scoring", "needs a checklist"),
        (turn(checklist=[{}]), "turns[1].checklist[0].question", "is missing"),
        (
            turn(checklist=[{"question": "q", "answer": "maybe"}]),
            "turns[1].checklist[0].answer",
            "must be Yes or No",
        ),
        (turn(max_new_tokens=0), "turns[1].max_new_tokens", "1 or more; got 0"),
        (turn(max_new_tokens=True), "turns[1].max_new_tokens", "a whole number"),
        (GOOD, "id", "stands on an earlier line"),
    ],
)
def test_faults_name_file_line_and_field(
    folder: Path, plain: dict[str, Any], field: str, says: str
) -> None:
    path = folder / "data.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(plain) + "\n")
    with pytest.raises(ValueError) as told:
        read_dialogues(path)
    assert str(told.value).startswith(f"{path}:2: {field}: ")
    assert says in str(told.value)


def test_a_line_that_is_no_json_and_a_file_without_dialogues(folder: Path) -> None:
    path = folder / "data.jsonl"
    path.write_text(json.dumps(GOOD) + '\n{"id": ')
    with pytest.raises(ValueError, match=r"data\.jsonl:2: not a line of JSON"):
        read_dialogues(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no dialogue"):
        read_dialogues(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_dialogues(folder / "none.jsonl")


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Twelve o'clock", 1),
        ("  twelve\no'clock. ", 1),
        ("twelve", 0),
        ("", 0),
        ("ＴＷＥＬＶＥ o'clock", 1),
    ],
)
def test_exact_leaves_out_what_does_not_count(said: str, score: int) -> None:
    asked = Turn(question="q", reference="Twelve o'clock", scoring="exact")
    assert own_score(asked, said) == score


def test_positions_count_what_is_right() -> None:
    asked = Turn(question="q", reference="1234", scoring="positions")
    assert [own_score(asked, said) for said in ("1234", "1934", "12", "", "12345")] == [
        1, 0.75, 0.5, 0, 1,
    ]  # fmt: skip
    judged = Turn(question="q", reference="1234", scoring="reference")
    assert own_score(judged, "1234") is None


def test_the_example_of_the_docs_reads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "dialogues.md").read_text(encoding="utf-8")
    plain = json.loads(page.partition("```json\n")[2].partition("```")[0])
    (tmp_path / "clocks").mkdir()
    for name in ("clocks/left.png", "clocks/right.png", "street.mp4"):
        (tmp_path / name).touch()
    (tmp_path / "data.jsonl").write_text(json.dumps(plain))
    (read,) = read_dialogues(tmp_path / "data.jsonl")
    assert [turn.scoring for turn in read.turns] == ["exact", "checklist"]
    for name in (*Dialogue.__dataclass_fields__, *Turn.__dataclass_fields__, *SCORINGS):
        assert f"| `{name}` |" in page
