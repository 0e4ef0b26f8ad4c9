"""Converters, on small files laid out as the benchmarks are published; the content is our own."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from PIL import Image

from raincheck_hf.bench.dialogues.converters import convert, multiverse
from raincheck_hf.bench.dialogues.converters.multiverse import as_records
from raincheck_hf.bench.dialogues.format import Check, Dialogue, read_dialogues
from raincheck_hf.cli import main


def converted(kind: str, source: Path, out: Path, *more: str) -> list[Dialogue]:
    """Through the command, and read back, which checks every field and file."""
    assert main(["convert", kind, str(source), "--out", str(out), *more]) == 0
    return read_dialogues(out)


def refused(kind: str, source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["convert", kind, str(source), "--out", str(out)]) == 2
    assert not out.exists()
    return capsys.readouterr().err


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(stream, kind)
    return stream.getvalue()


# MultiVerse: data/train-00000-of-00001.parquet, a struct of lists a conversation.


def multiverse_record(index: str = "12", kind: str = "PNG") -> dict[str, Any]:
    """As `pyarrow` gives a row of the dataset."""
    return {
        "index": index,
        "image": {"bytes": encoded(kind), "path": f"{index}.img"},
        "character": "A baker from Lyon",
        "scenario": "She counts what is left on the shelf.",
        "goal": "Know what to bake tomorrow",
        "conversation": {
            "speaker": ["USER", "ASSISTANT", "USER", "ASSISTANT"],
            "utterance": ["How many rolls?", "Eleven.", "Is that enough?", "No, bake twenty."],
            "checklist": [
                {"question": [], "main_criteria": [], "sub_criteria": []},
                {
                    "question": ["Does it say eleven?", "Is it short?"],
                    "main_criteria": ["Perception", "Style"],
                    "sub_criteria": ["Counting", None],
                },
                {"question": [], "main_criteria": [], "sub_criteria": []},
                {"question": [], "main_criteria": [], "sub_criteria": []},
            ],
        },
        "main_goal_category": "Planning",
        "sub_goal_category": "Food",
        "main_task_category": "Counting",
        "sub_task_category": "Objects",
        "image_main_category": "Food",
        "image_sub_category": "Bread",
    }


def check_multiverse(dialogue: Dialogue, out: Path, suffix: str) -> None:
    first, second = dialogue.turns
    assert dialogue.category == "Counting / Objects"
    assert dialogue.context == (
        "The user's character: A baker from Lyon\n"
        "The user's scenario: She counts what is left on the shelf.\n"
        "The user's goal: Know what to bake tomorrow"
    )
    assert first.question == "How many rolls?" and first.reference == "Eleven."
    assert first.images == (f"{out.stem}.media/{dialogue.id}.{suffix}",)
    assert first.scoring == "checklist"
    assert first.checklist == (
        Check("Does it say eleven?", "Yes", "Perception / Counting"),
        Check("Is it short?", "Yes", "Style"),
    )
    assert (second.images, second.scoring, second.reference) == (
        (),
        "reference",
        "No, bake twenty.",
    )
    assert Image.open(out.parent / first.images[0]).size == (8, 6)


def test_multiverse_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="writes and reads parquet; the convert extra")
    from pyarrow import parquet

    (tmp_path / "data").mkdir()
    for number, names in enumerate((("12", "13"), ("14",))):
        table = pyarrow.Table.from_pylist([multiverse_record(name) for name in names])
        parquet.write_table(table, tmp_path / "data" / f"train-{number:05}-of-00002.parquet")
    out = tmp_path / "made" / "multiverse.jsonl"
    read = converted("multiverse", tmp_path, out)
    assert [dialogue.id for dialogue in read] == ["multiverse-12", "multiverse-13", "multiverse-14"]
    for dialogue in read:
        check_multiverse(dialogue, out, "png")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="cannot be read"):
        convert("multiverse", broken, tmp_path / "other.jsonl")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Rows, as if a parquet file held them."""
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(multiverse, "_records", lambda path: rows)
    (tmp_path / "train.parquet").touch()
    return rows


def test_multiverse_rows(records: list[dict[str, Any]], tmp_path: Path) -> None:
    # A list of records a conversation, as other versions of the library store it.
    listed = multiverse_record("9", "JPEG")
    listed["conversation"] = [
        {**turn, "checklist": as_records(turn["checklist"], "")}
        for turn in as_records(listed["conversation"], "")
    ]
    listed["conversation"][0]["speaker"] = "user"
    records += [multiverse_record("8"), listed]
    out = tmp_path / "out.jsonl"
    eight, nine = converted("multiverse", tmp_path, out)
    check_multiverse(eight, out, "png")
    check_multiverse(nine, out, "jpeg")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"index": ""}, "'index' must be a text"),
        ({"image": None}, "'image' holds no picture; --skip-missing"),
        ({"image": {"bytes": b"nothing"}}, "bytes that are no picture"),
        ({"conversation": None}, "0 utterances are not pairs"),
        ({"conversation": [{"speaker": "USER"}] * 3}, "3 utterances are not pairs"),
        ({"conversation": [{"speaker": "ASSISTANT", "utterance": "a"}] * 2}, "must be user"),
        ({"conversation": [{"speaker": "USER", "utterance": "a"}] * 2}, "must be assistant"),
        ({"conversation": {"speaker": ["USER"], "utterance": []}}, "not of one length"),
        ({"conversation": "hello"}, "must be a list of records"),
    ],
)
def test_multiverse_in_another_layout(
    records: list[dict[str, Any]], tmp_path: Path, change: dict[str, Any], says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    records += [multiverse_record(), {**multiverse_record("13"), **change}]
    error = refused("multiverse", tmp_path, tmp_path / "out.jsonl", capsys)
    assert says in error
    assert "train.parquet, row 2" in error or "multiverse-13" in error


def test_multiverse_needs_a_reader_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused("multiverse", tmp_path, tmp_path / "out.jsonl", capsys)
    assert "no *.parquet in" in error
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").touch()
    error = refused("multiverse", tmp_path, tmp_path / "out.jsonl", capsys)
    assert "pip install pyarrow" in error


# ConvBench: ConvBench.xlsx with shared strings, pictures in visit_bench_images.


HEADS = ("ID", "image_id", "The_first_turn_instruction", "The_second_turn_instruction",
         "The_third_turn_instruction")  # fmt: skip
MORE_HEADS = ("third_turn_demands", "first_turn_answer", "First_turn_instruction_category",
              "instruction-conditioned-caption")  # fmt: skip
LAMP = ("1", "30_lamp.png", "What is shown?", "Why is it dark?", "Write a slogan.")
BOAT = ("2", "31 boat & copy.png", "Which boat?", "Where does it go?", "Write a song.")

WORKBOOK = {
    "xl/workbook.xml": """<workbook
 xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"
 xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships">
<sheets><sheet name="dialogues" sheetId="1" r:id="rId3"/></sheets></workbook>""",
    "xl/_rels/workbook.xml.rels": """<Relationships
 xmlns="http://schemas.openxmlformats.org/package/2006/relationships">
<Relationship Id="rId1" Target="styles.xml"/>
<Relationship Id="rId3" Target="worksheets/first.xml"/></Relationships>""",
}


def write_workbook(path: Path, rows: list[tuple[str, ...]]) -> None:
    """Texts are shared, numbers are not, and empty styled cells and rows stand around."""
    main_space = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    shared: list[str] = []
    body = []
    for number, row in enumerate(rows, 1):
        cells = []
        for column, text in zip("ABCDEFGHIJKLM", row, strict=False):
            if text.isdigit():
                cells.append(f'<c r="{column}{number}" s="2"><v>{text}</v></c>')
            elif text:
                shared.append(text)
                cells.append(f'<c r="{column}{number}" s="3" t="s"><v>{len(shared) - 1}</v></c>')
        cells.append(f'<c r="Z{number}" s="4"/>')
        body.append(f'<row r="{number}">{"".join(cells)}</row>')
    body.append(f'<row r="{len(rows) + 1}"><c r="A{len(rows) + 1}" s="4"/></row>')
    # The first text comes in two runs with a reading aid, as rich text does.
    items = [f"<si><t>{escape(text)}</t></si>" for text in shared]
    half = escape(shared[0][:1]), escape(shared[0][1:])
    items[0] = f"<si><r><t>{half[0]}</t></r><r><t>{half[1]}</t></r><rPh><t>aid</t></rPh></si>"
    with zipfile.ZipFile(path, "w") as book:
        for name, text in WORKBOOK.items():
            book.writestr(name, text)
        book.writestr("xl/sharedStrings.xml", f"<sst {main_space}>{''.join(items)}</sst>")
        sheet = f"<worksheet {main_space}><sheetData>{''.join(body)}</sheetData></worksheet>"
        book.writestr("xl/worksheets/first.xml", sheet)


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    folder = tmp_path / "ConvBench"
    (folder / "visit_bench_images" / "images").mkdir(parents=True)
    (folder / "visit_bench_images" / LAMP[1]).write_bytes(encoded("PNG"))
    # Where the evaluation's own path has it.
    (folder / "visit_bench_images" / "images" / BOAT[1]).write_bytes(encoded("PNG"))
    return folder


def test_convbench_as_the_repository_has_it(bench: Path, tmp_path: Path) -> None:
    write_workbook(bench / "ConvBench.xlsx", [HEADS, LAMP, BOAT])
    lamp, boat = converted("convbench", bench, tmp_path / "out.jsonl")
    assert lamp.id == "convbench-1" and boat.id == "convbench-2"
    assert [turn.question for turn in lamp.turns] == list(LAMP[2:])
    assert lamp.turns[0].images == ("ConvBench/visit_bench_images/30_lamp.png",)
    assert boat.turns[0].images == ("ConvBench/visit_bench_images/images/31 boat & copy.png",)
    assert [turn.images for turn in boat.turns[1:]] == [(), ()]
    assert {turn.scoring for turn in lamp.turns} == {"rating"}
    assert [turn.category for turn in lamp.turns] == ["perception", "reasoning", "creation"]


def test_convbench_with_the_columns_of_its_evaluation(bench: Path, tmp_path: Path) -> None:
    demands = "1. Is it catchy?\n2. Is it true ?"
    more = (demands, "A lamp.", "ocr", "A lamp in a dark room.")
    write_workbook(bench / "ConvBench.xlsx", [HEADS + MORE_HEADS, LAMP + more, BOAT])
    lamp, boat = converted("convbench", bench / "ConvBench.xlsx", tmp_path / "out.jsonl")
    assert lamp.context == "A lamp in a dark room."
    first, second, third = lamp.turns
    assert (first.reference, first.scoring, first.category) == ("A lamp.", "reference", "ocr")
    assert (second.scoring, second.category) == ("rating", "reasoning")
    assert third.checklist == (Check("Is it catchy?"), Check("Is it true ?"))
    assert boat.turns[2].checklist == () and boat.context is None


def test_convbench_in_another_layout(
    bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    book = bench / "ConvBench.xlsx"
    assert "no ConvBench.xlsx" in refused("convbench", bench, out, capsys)
    book.write_text("ID,image_id")
    assert "cannot be read as an Excel workbook" in refused("convbench", bench, out, capsys)
    write_workbook(book, [HEADS, LAMP, (*BOAT[:3], "", BOAT[4])])
    error = refused("convbench", bench, out, capsys)
    assert "row 3: 'The_second_turn_instruction' must be a text" in error
    write_workbook(book, [HEADS, LAMP, ("3", "gone.png", *BOAT[2:])])
    error = refused("convbench", bench, out, capsys)
    assert "gone.png" in error and "--skip-missing" in error
    assert [one.id for one in converted("convbench", bench, out, "--skip-missing")] == [
        "convbench-1"
    ]
    assert "1 dialogues left out for missing media" in capsys.readouterr().out
    before = out.read_text()
    assert main(["convert", "convbench", str(bench), "--out", str(out)]) == 2
    assert out.read_text() == before
    with pytest.raises(ValueError, match="no such file or folder"):
        convert("convbench", tmp_path / "none", tmp_path / "other.jsonl")


# MT-Video-Bench: mtqa/ABILITY.json, checklist/ABILITY_CheckList.json, videos/NAME.mp4.


def rounds(*abilities: str) -> dict[str, dict[str, str]]:
    return {
        f"Round {number}": {"User": f"Q {number}", "Assistant": f"A {number}", "Ability": ability}
        for number, ability in enumerate(abilities, 1)
    }


CHECKLIST = {"round index": 2, "Q1": "Does it name the boat?", "A1": "Yes",
             "Q2": "Does it invent a captain?", "A2": "no"}  # fmt: skip


def write_videos_bench(folder: Path, mtqa: Any, checklist: Any, name: str = "mtqa") -> None:
    for path, plain in (
        (folder / name / "memory_recall.json", mtqa),
        (folder / "checklist" / "memory_recall_CheckList.json", checklist),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain))
    (folder / "videos").mkdir(exist_ok=True)
    (folder / "videos" / "harbour_01.mp4").touch()


def test_mt_video_bench(tmp_path: Path) -> None:
    abilities = ["Object Reference", "Memory Recall", "Memory Recall"]
    events = [
        {"event_index": 3, "mtqa": rounds(*abilities)},
        {"event_index": "4", "mtqa": rounds("Memory Recall")},
    ]
    folder = tmp_path / "MT"
    write_videos_bench(folder, {"harbour_01": events}, {"harbour_01": {"3": [CHECKLIST]}})
    three, four = converted("mt-video-bench", folder, tmp_path / "out.jsonl")
    assert three.id == "memory_recall/harbour_01/3" and three.category == "memory_recall"
    assert [turn.question for turn in three.turns] == ["Q 1", "Q 2", "Q 3"]
    assert [turn.category for turn in three.turns] == abilities
    assert [turn.videos for turn in three.turns] == [("MT/videos/harbour_01.mp4",), (), ()]
    assert [turn.scoring for turn in three.turns] == ["none", "checklist", "none"]
    assert three.turns[1].reference == "A 2"
    assert three.turns[1].checklist == (
        Check("Does it name the boat?", "Yes"),
        Check("Does it invent a captain?", "No"),
    )
    assert [turn.scoring for turn in four.turns] == ["none"]


def test_mt_video_bench_of_an_earlier_version(tmp_path: Path) -> None:
    event = {"event_index": 3, **rounds("Memory Recall", "Memory Recall")}
    checklist = {"harbour_01": {"event_3": [CHECKLIST]}}
    write_videos_bench(tmp_path, {"harbour_01": [event]}, checklist, "data")
    (read,) = converted("mt-video-bench", tmp_path, tmp_path / "out.jsonl")
    assert [turn.scoring for turn in read.turns] == ["none", "checklist"]


@pytest.mark.parametrize(
    ("events", "checklist", "says"),
    [
        ("x", {}, "must be a list of events"),
        ([{"mtqa": rounds("a")}], {}, "without 'event_index'"),
        ([{"event_index": 1, "mtqa": {}}], {}, "rounds must be 'Round 1'"),
        ([{"event_index": 1, "mtqa": {"Round 2": {}}}], {}, "rounds must be 'Round 1'"),
        ([{"event_index": 1, "mtqa": {"Round 1": {"User": "q"}}}], {}, "round 1: 'Assistant'"),
        ([{"event_index": 1, "mtqa": rounds("a")}], {"1": [{"Q1": "q"}]}, "'round index'"),
        (
            [{"event_index": 1, "mtqa": rounds("a")}],
            {"1": [{"round index": 1, "Q1": "q"}]},
            "'A1' must be a text",
        ),
    ],
)
def test_mt_video_bench_in_another_layout(
    tmp_path: Path, events: Any, checklist: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_videos_bench(tmp_path, {"harbour_01": events}, {"harbour_01": checklist})
    error = refused("mt-video-bench", tmp_path, tmp_path / "out.jsonl", capsys)
    assert says in error and "harbour_01" in error


def test_mt_video_bench_without_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert "no mtqa/*.json" in refused("mt-video-bench", tmp_path, out, capsys)
    events = [{"event_index": 1, "mtqa": rounds("a")}]
    write_videos_bench(tmp_path, {"pier": events, "harbour_01": events}, {})
    assert "pier.mp4" in refused("mt-video-bench", tmp_path, out, capsys)
    (tmp_path / "mtqa" / "memory_recall.json").write_text("{")
    assert "cannot be read as JSON" in refused("mt-video-bench", tmp_path, out, capsys)
    (tmp_path / "checklist" / "memory_recall_CheckList.json").unlink()
    assert "memory_recall_CheckList.json" in refused("mt-video-bench", tmp_path, out, capsys)
