"""The web demo without its page: conversations, pictures, cells, and what the page would show."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from raincheck_hf import RaincheckReport, RaincheckSession, register_selector
from raincheck_hf.tiny import as_video, make_board

DEMOS = Path(__file__).parents[1] / "demos"
sys.path.insert(0, str(DEMOS))

av = pytest.importorskip("av", reason="PyAV reads the demo's videos")

import chat_page as page  # noqa: E402
from chat_backend import WAYS, Controls, Conversation, Conversations, Refused  # noqa: E402
from chat_cells import (  # noqa: E402
    DROPPED,
    PENDING,
    RESTORED,
    SELECTED,
    Panel,
    cell_states,
    panels,
)
from chat_media import BadMedia, Medium, read_file  # noqa: E402
from chat_models import Models, most_pixels  # noqa: E402

ONLY = {way: Controls(ways=(way,)) for way in WAYS}
SLOW = Controls(ways=("raincheck",), chunk_size=1, guard_tokens=0)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture
def conversation(models: Models) -> Iterator[Conversation]:
    found = Conversation(models)
    found.attach_board()
    yield found
    found.clear()


def ask(conversation: Conversation, text: str, controls: Controls | None = None) -> dict[str, str]:
    """Ask to the end; the answers by way."""
    for _ in conversation.ask(text, controls or Controls()):
        pass
    return {way: answer.text for way, answer in conversation.turns[-1].answers.items()}


def counts(shown: Sequence[Panel]) -> list[int]:
    return [sum(panel.count(state) for panel in shown) for state in range(4)]


def wait_until_restored(conversation: Conversation) -> None:
    deadline = time.monotonic() + 30
    while conversation.pending:
        assert time.monotonic() < deadline, "the background never restored the rest"
        time.sleep(0.01)


def write_video(path: Path, pictures: Sequence[Image.Image], rate: int = 4) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return path


# -- cells ------------------------------------------------------------------------------------


def test_states_follow_the_order_of_restoration() -> None:
    report = RaincheckReport(
        n_visual=6,
        n_selected=2,
        n_deferred=4,
        # A gap between 12 and 15, as a video's timestamps make one; best first, not in order.
        selected=torch.tensor([11, 16]),
        deferred=torch.tensor([17, 10, 15, 12]),
        pending=2,
    )
    back = [RESTORED, SELECTED, PENDING, PENDING, SELECTED, RESTORED]
    assert cell_states(report, drops=False).tolist() == back
    dropped = [DROPPED, SELECTED, DROPPED, DROPPED, SELECTED, DROPPED]
    assert cell_states(report, drops=True).tolist() == dropped


def test_panels_cut_pictures_and_frames() -> None:
    image = Image.new("RGB", (64, 32))
    media = [Medium("a", "image", [image]), Medium("b", "video", [image] * 4)]
    states = np.arange(6, dtype=np.int8)
    found = panels(media, [(1, 1, 2), (2, 2, 1)], states)
    assert [panel.states.tolist() for panel in found] == [[[0, 1]], [[2], [3]], [[4], [5]]]
    assert [panel.name for panel in found] == ["a", "b, frame 1", "b, frame 2"]


# -- conversations ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen3_vl", "qwen3_5"])
def test_three_ways_answer_with_figures(models: Models, model: str) -> None:
    conversation = Conversation(models, model)
    conversation.attach_board()
    said = ask(conversation, "Read row 3.")
    answers = conversation.turns[0].answers
    assert list(said) == list(WAYS)
    assert all(answer.state == "done" and answer.text for answer in answers.values())
    assert all((answer.ttft_ms or 0) > 0 for answer in answers.values())
    assert counts(conversation.panels("full")) == [64, 0, 0, 0]
    assert counts(conversation.panels("hard")) == [20, 0, 0, 44]
    wait_until_restored(conversation)
    assert counts(conversation.panels("raincheck")) == [20, 44, 0, 0]
    assert conversation.panels("raincheck")[0].states.shape == (8, 8)
    conversation.clear()


def test_answers_are_those_of_a_plain_session(models: Models, conversation: Conversation) -> None:
    mine = [ask(conversation, text, ONLY["raincheck"]) for text in ("Read row 3.", "Read row 5.")]
    session = RaincheckSession(*models.get("qwen3_vl"))
    first = session.ask("Read row 3.", images=[make_board(8, 8, 1).image()], max_new_tokens=256)
    session.finish()
    second = session.ask("Read row 5.", max_new_tokens=256)
    assert [said["raincheck"] for said in mine] == [first, second]


def test_text_streams_and_cells_fill_meanwhile(conversation: Conversation) -> None:
    texts, seen = [], []
    for _ in conversation.ask("Read the board.", SLOW):
        texts.append(conversation.turns[0].answers["raincheck"].text)
        seen.append(counts(conversation.panels("raincheck")))
    assert all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False))
    assert len(set(texts)) > 3, "the answer came at once, not as it was written"
    restored = [found[RESTORED] for found in seen if found[SELECTED]]
    assert restored == sorted(restored)
    assert len(set(restored)) > 3, "the view did not fill during the answer"
    assert all(sum(found) == 64 for found in seen if found[SELECTED])


def test_cells_go_on_filling_after_a_short_answer(conversation: Conversation) -> None:
    ask(conversation, "What is in D5?", ONLY["raincheck"])
    report = conversation.turns[0].answers["raincheck"].report
    assert report is not None and report.restored_in_answer == 0, "the guard lets nothing ride"
    wait_until_restored(conversation)
    assert counts(conversation.panels("raincheck")) == [20, 44, 0, 0]


def test_new_picture_in_turn_two_is_a_new_view(conversation: Conversation, tmp_path: Path) -> None:
    ask(conversation, "Read row 3.")
    make_board(4, 6, 9).image().save(tmp_path / "second.png")
    assert conversation.attach([tmp_path / "second.png"]) == []
    ask(conversation, "Read row 2.")
    for way in WAYS:
        [panel] = conversation.panels(way)
        assert panel.states.shape == (4, 6)
        assert panel.name == "second.png"


def test_text_only_turn_keeps_the_view(conversation: Conversation) -> None:
    ask(conversation, "Read row 3.")
    ask(conversation, "Read row 2.")
    assert counts(conversation.panels("raincheck")) == [20, 44, 0, 0], "the barrier restored all"


def test_stop_then_ask_again(conversation: Conversation) -> None:
    for _ in conversation.ask("Read the board.", Controls()):
        if conversation.turns[0].answers["full"].text:
            conversation.stop()
    answers = conversation.turns[0].answers
    assert [answers[way].state for way in WAYS] == ["stopped", "skipped", "skipped"]
    assert 0 < len(answers["full"].text) < 64
    ask(conversation, "Read row 3.")
    again = conversation.turns[1].answers
    assert all(answer.state == "done" for answer in again.values())
    # Ways that skipped the first question see its picture with the second one.
    assert [again[way].report.n_visual for way in WAYS] == [0, 64, 64]  # type: ignore[union-attr]


def test_leaving_ends_the_answer(conversation: Conversation) -> None:
    answers = conversation.ask("Read the board.", SLOW)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert not conversation.busy
    assert conversation.turns[0].answers["raincheck"].state == "stopped"
    assert ask(conversation, "Read row 3.", SLOW)["raincheck"]


def test_two_conversations_at_once_do_not_meet(models: Models) -> None:
    held = Conversations(models)
    tabs = ("one", "two")
    said: dict[str, list[str]] = {}

    def talk(tab: str, boards: int) -> None:
        mine = held.of(tab)
        for _ in range(boards):
            mine.attach_board()
        said[tab] = [ask(mine, text, SLOW)["raincheck"] for text in ("Read row 3.", "Read row 5.")]

    threads = [threading.Thread(target=talk, args=(tab, n + 1)) for n, tab in enumerate(tabs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(said)
    for tab in tabs:
        assert len(held.of(tab).turns) == 2
        held.close(tab)
    for n, tab in enumerate(tabs):
        talk(tab, n + 1)
    assert said == together
    assert said["one"] != said["two"]


def test_closing_a_tab_frees_its_cache(models: Models) -> None:
    held = Conversations(models)
    mine = held.of("tab")
    mine.attach_board()
    ask(mine, "Read row 3.", ONLY["raincheck"])
    cache = weakref.ref(mine._lanes["raincheck"].session.cache)
    del mine
    held.close("tab")
    held.close("tab")
    assert len(held) == 0
    assert cache() is None or cache().closed  # type: ignore[union-attr]


def test_clear_in_the_middle_begins_anew(conversation: Conversation) -> None:
    for _ in conversation.ask("Read the board.", Controls()):
        if conversation.turns and conversation.turns[0].answers["full"].text:
            conversation.clear()
    assert conversation.turns == []
    assert conversation.pending == 0
    conversation.attach_board()
    assert ask(conversation, "Read row 3.", ONLY["full"])["full"]


# -- what goes wrong --------------------------------------------------------------------------


def test_one_way_that_fails_leaves_the_others_and_the_next_turn(
    conversation: Conversation,
) -> None:
    @register_selector("demo_broken")
    def broken(context: object) -> torch.Tensor:
        raise RuntimeError("no idea")

    ask(conversation, "Read row 3.", Controls(selector="demo_broken"))
    answers = conversation.turns[0].answers
    assert [answers[way].state for way in WAYS] == ["done", "failed", "failed"]
    assert "demo_broken" in answers["hard"].error and "no idea" in answers["hard"].error
    conversation.attach_board()
    ask(conversation, "Read row 3.")
    assert all(answer.state == "done" for answer in conversation.turns[1].answers.values())


def test_what_is_refused_says_so(conversation: Conversation) -> None:
    with pytest.raises(Refused, match="Type a question"):
        ask(conversation, "  ")
    with pytest.raises(Refused, match="at least one way"):
        ask(conversation, "Read row 3.", Controls(ways=()))
    with pytest.raises(ValueError, match="retention"):
        ask(conversation, "Read row 3.", Controls(retention=0))
    answers = conversation.ask("Read the board.", SLOW)
    next(answers)
    with pytest.raises(Refused, match="being written"):
        ask(conversation, "Read row 3.")
    answers.close()  # type: ignore[attr-defined]
    assert len(conversation.attached) == 0 and len(conversation.turns) == 1


def _half_a_png(path: Path) -> None:
    make_board(8, 8, 1).image().save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("half.png", _half_a_png),
        ("notes.png", lambda path: path.write_text("What is in D5?")),
        ("empty.jpg", lambda path: path.write_bytes(b"")),
        ("notes.mp4", lambda path: path.write_text("not a film")),
        ("noise.webm", lambda path: path.write_bytes(bytes(range(256)) * 40)),
    ],
)
def test_files_that_cannot_be_read_are_told(
    conversation: Conversation, tmp_path: Path, name: str, write: object
) -> None:
    write(tmp_path / name)  # type: ignore[operator]
    [message] = conversation.attach([tmp_path / name])
    assert name in message and "cannot be read" in message
    assert ask(conversation, "Read row 3.", ONLY["full"])["full"]


# -- media ------------------------------------------------------------------------------------


def test_twenty_megapixels_are_shrunk_at_once(models: Models, tmp_path: Path) -> None:
    data = pytest.importorskip("skimage.data", reason="scikit-image has the photograph")
    photograph = Image.fromarray(data.astronaut()).resize((5472, 3648), Image.Resampling.BICUBIC)
    photograph.save(tmp_path / "photo.jpg", quality=90)
    conversation = Conversation(models)
    start = time.monotonic()
    assert conversation.attach([tmp_path / "photo.jpg"]) == []
    assert time.monotonic() - start < 5
    [medium] = conversation.attached
    width, height = medium.pictures[0].size
    limit = most_pixels(models.get("qwen3_vl")[1])
    assert limit is not None and 0.9 * limit < width * height <= limit
    assert width / height == pytest.approx(5472 / 3648, rel=0.01)
    assert all(len(uri) < 100_000 for uri in medium.shown)
    few = Controls(ways=("raincheck",), most_tokens=4, selector="uniform")
    ask(conversation, "What is in D5?", few)
    [panel] = conversation.panels("raincheck")
    assert 900 < panel.states.size <= 1024
    conversation.clear()


def test_photographs_stand_upright(tmp_path: Path) -> None:
    sideways = Image.new("RGB", (60, 40))
    exif = sideways.getexif()
    exif[0x0112] = 6  # turned by a quarter
    sideways.save(tmp_path / "phone.jpg", exif=exif)
    assert read_file(tmp_path / "phone.jpg").pictures[0].size == (40, 60)


def test_short_video(conversation: Conversation, tmp_path: Path) -> None:
    boards = [make_board(4, 4, seed) for seed in range(3)]
    film = write_video(tmp_path / "boards.mp4", as_video(boards), rate=2)
    assert conversation.attach([film]) == []
    [medium] = conversation.attached
    assert medium.kind == "video" and len(medium.pictures) % 2 == 0
    ask(conversation, "What is in B2 of frame 2?")
    shown = conversation.panels("raincheck")
    assert len(shown) == len(medium.pictures) // 2
    assert all(panel.states.shape == (4, 4) for panel in shown)


def test_one_picture_film_and_long_film(tmp_path: Path) -> None:
    black = Image.new("RGB", (64, 64))
    short = read_file(write_video(tmp_path / "one.mp4", [black]))
    assert len(short.pictures) == 4
    with pytest.raises(BadMedia, match="lasts 90 s"):
        read_file(write_video(tmp_path / "long.mp4", [black] * 90, rate=1))


# -- what the page shows ----------------------------------------------------------------------


def test_page_escapes_what_people_write(conversation: Conversation) -> None:
    nasty = "<script>alert(1)</script> {{7*7}} ${8*8} @children"
    ask(conversation, nasty, Controls(most_tokens=1))
    html = page.transcript(conversation) + page.notice([nasty])
    assert not any(bad in html for bad in ("<script", "{{", "${", "@children"))
    assert "&lt;script&gt;" in html


def test_page_counts_cells(conversation: Conversation) -> None:
    assert "not seen yet" in page.views(conversation, WAYS)
    ask(conversation, "Read row 3.")
    wait_until_restored(conversation)
    html = page.views(conversation, WAYS)
    assert 'data-way="raincheck" data-selected="20" data-restored="44" data-pending="0"' in html
    assert 'aria-label="board 1: 20 selected, 0 restored, 0 pending, 44 dropped"' in html
    assert "http" not in html
    assert 'data-way="hard"' not in page.views(conversation, ("full",))


def test_command_line_refuses_a_missing_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gradio", reason="the demo's page needs gradio")
    from gradio_app import main

    with pytest.raises(SystemExit) as stopped:
        main(["--model", str(tmp_path / "none")])
    assert stopped.value.code == 2
    assert f"error: --model {tmp_path / 'none'}: " in capsys.readouterr().err
