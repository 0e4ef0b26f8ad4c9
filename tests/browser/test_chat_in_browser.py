"""The web demo as a person uses it, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raincheck_hf.tiny import as_video, make_board

WAYS = ("full", "hard", "raincheck")
FILES: dict[str, Callable[[Path], object]] = {
    "half.png": lambda path: path.write_bytes(_png()[:900]),
    "notes.png": lambda path: path.write_text("What is in D5?"),
    "notes.mp4": lambda path: path.write_text("not a film"),
}


def ask(tab: Any, text: str) -> None:
    """Type a question and press Enter."""
    tab.get_by_label("Question").fill(text)
    tab.get_by_label("Question").press("Enter")


def answer(way: str, turn: int, state: str = "") -> str:
    """Selector of a way's answer in a turn, counted from 1."""
    wanted = f'[data-state="{state}"]' if state else ""
    return f'.rc-turn:nth-of-type({turn}) .rc-answer[data-way="{way}"]{wanted}'


def wait_done(tab: Any, turn: int, ways: tuple[str, ...] = WAYS) -> dict[str, str]:
    """Wait until all ways have answered; what they said."""
    for way in ways:
        tab.wait_for_selector(answer(way, turn, "done"))
    said = {way: tab.inner_text(answer(way, turn) + " .rc-said") for way in ways}
    tab.wait_for_selector("#ask:not([disabled])")
    return said


def cells(tab: Any, way: str) -> dict[str, int]:
    """How many cells of a way's view are in each state."""
    data = tab.eval_on_selector(f'.rc-view[data-way="{way}"]', "view => ({...view.dataset})")
    return {state: int(count) for state, count in data.items() if state != "way"}


def wait_restored(tab: Any, total: int) -> None:
    """Wait until raincheck's view has nothing pending."""
    tab.wait_for_function(
        """total => {const d = document.querySelector('.rc-view[data-way=raincheck]').dataset;
        return +d.pending === 0 && +d.selected + +d.restored === total}""",
        arg=total,
    )


def upload(tab: Any, *paths: Path) -> None:
    tab.set_input_files("input[type=file]", [str(path) for path in paths])


def set_number(tab: Any, label: str, value: int) -> None:
    box = tab.get_by_label(f"number input for {label}")
    box.fill(str(value))
    box.press("Tab")


def only(tab: Any, *ways: str) -> None:
    for way in WAYS:
        tab.get_by_role("checkbox", name=way, exact=True).set_checked(way in ways)


def record(tab: Any) -> None:
    """Note each state of full's answer and of raincheck's view from now on."""
    tab.evaluate(
        """() => {window.texts = new Set(); window.restored = new Set();
        new MutationObserver(() => {
          const said = document.querySelector('.rc-answer[data-way=full] .rc-said');
          const view = document.querySelector('.rc-view[data-way=raincheck]');
          if (said) window.texts.add(said.textContent);
          if (view && +view.dataset.selected) window.restored.add(+view.dataset.restored);
        }).observe(document.body, {subtree: true, childList: true, characterData: true,
                                   attributes: true})}"""
    )


def save_board(path: Path, rows: int = 8, columns: int = 8, seed: int = 5) -> Path:
    make_board(rows, columns, seed).image().save(path)
    return path


def _png() -> bytes:
    import io

    file = io.BytesIO()
    make_board(8, 8, 1).image().save(file, "PNG")
    return file.getvalue()


def test_upload_ask_and_watch(tab: Any, tmp_path: Path, save: Callable[..., None]) -> None:
    save(tab, "start")
    upload(tab, save_board(tmp_path / "mine.png", 12, 12, seed=21))
    tab.wait_for_selector('#attached img[alt="mine.png"]')
    assert tab.locator("#attached img").count() == 1, "one's own picture replaces the sample"
    set_number(tab, "Chunk: restored a step", 4)
    set_number(tab, "Guard: steps before that", 0)
    record(tab)
    ask(tab, "Read the board.")
    tab.wait_for_function(
        "+document.querySelector('.rc-view[data-way=raincheck]').dataset.restored > 0"
    )
    save(tab, "writing")
    said = wait_done(tab, 1)
    wait_restored(tab, 144)
    save(tab, "answered")
    texts, restored = tab.evaluate("[[...window.texts], [...window.restored]]")
    assert len(texts) > 3, "the text did not stream"
    assert sorted(texts, key=len)[-1] == said["full"]
    assert len(restored) > 2 and restored == sorted(restored), "the view did not fill"
    assert cells(tab, "full")["selected"] == 144
    assert cells(tab, "hard") == {"selected": 44, "restored": 0, "pending": 0, "dropped": 100}
    for way in WAYS:
        figures = tab.inner_text(answer(way, 1) + " .rc-figures")
        assert re.search(r"\d+ tokens · TTFT \d+ ms · \d+ tokens/s", figures), figures


def test_follow_up_at_once_and_new_picture(
    tab: Any, tmp_path: Path, save: Callable[..., None]
) -> None:
    only(tab, "raincheck")
    ask(tab, "What is in D5?")  # one digit: all that was deferred is still pending then
    tab.wait_for_selector("#ask:not([disabled])")
    wait_done(tab, 1, ("raincheck",))
    ask(tab, "Read row 3.")
    wait_done(tab, 2, ("raincheck",))
    assert cells(tab, "raincheck") == {"selected": 20, "restored": 44, "pending": 0, "dropped": 0}
    upload(tab, save_board(tmp_path / "second.png", 6, 10, seed=8))
    tab.wait_for_selector('#attached img[alt="second.png"]')
    ask(tab, "Read row 2.")
    wait_done(tab, 3, ("raincheck",))
    wait_restored(tab, 60)
    assert cells(tab, "raincheck")["selected"] == 18
    assert "second.png" in tab.get_attribute(".rc-view svg", "aria-label")
    # Hard saw nothing so far; it is shown both pictures with its first question.
    only(tab, "hard")
    ask(tab, "Read row 2.")
    wait_done(tab, 4, ("hard",))
    assert sum(cells(tab, "hard").values()) == 124
    save(tab, "two-pictures")


def large_board(tab: Any, tmp_path: Path) -> None:
    """Attach a board whose reading takes three ways several seconds."""
    upload(tab, save_board(tmp_path / "large.png", 12, 12))
    tab.wait_for_selector('#attached img[alt="large.png"]')


def wait_stopped(tab: Any) -> None:
    """Wait until a stopped question has come to its end, and see that it ended early."""
    tab.wait_for_selector("#ask:not([disabled])")
    states = [tab.get_attribute(answer(way, 1), "data-state") for way in WAYS]
    assert {"stopped", "skipped"} & set(states), states
    assert states == sorted(states, key=("done", "stopped", "skipped").index)


def test_stop_then_ask_again(tab: Any, tmp_path: Path) -> None:
    large_board(tab, tmp_path)
    ask(tab, "Read the board.")
    tab.wait_for_selector(answer("full", 1, "writing"))
    tab.get_by_role("button", name="Stop").click()
    wait_stopped(tab)
    ask(tab, "Read row 3.")
    assert all(wait_done(tab, 2).values())
    wait_restored(tab, 144)


def test_two_tabs_do_not_meet_and_closing_frees(app: Any, open_tab: Callable[..., Any]) -> None:
    one, two = open_tab(), open_tab()
    before = app.tabs
    for tab in (one, two):
        only(tab, "raincheck")
    one.get_by_role("button", name="New board").click()
    one.wait_for_selector('#attached img[alt="board 2"]')
    ask(one, "Read the board.")
    ask(two, "Read row 3.")
    first = wait_done(one, 1, ("raincheck",))
    second = wait_done(two, 1, ("raincheck",))
    assert first != second
    assert one.locator(".rc-turn").count() == two.locator(".rc-turn").count() == 1
    one.get_by_role("button", name="Clear conversation").click()
    one.wait_for_selector(".rc-turn", state="detached")
    assert two.locator(".rc-turn").count() == 1
    two.close()
    for _ in range(200):  # noticed at the next heartbeat
        if app.tabs < before:
            break
        one.wait_for_timeout(100)
    assert app.tabs == before - 1, "a closed tab's conversation is still held"


@pytest.mark.parametrize("name", FILES)
def test_bad_file_is_a_message(
    tab: Any, tmp_path: Path, name: str, save: Callable[..., None]
) -> None:
    FILES[name](tmp_path / name)
    upload(tab, tmp_path / name)
    tab.wait_for_selector(".rc-notice")
    assert f"{name} cannot be read" in tab.inner_text(".rc-notice")
    if name == "notes.png":
        save(tab, "bad-file")
    only(tab, "raincheck")
    ask(tab, "Read row 3.")
    assert wait_done(tab, 1, ("raincheck",))["raincheck"]
    assert tab.locator(".rc-notice").count() == 0


def test_questions_that_are_refused(tab: Any) -> None:
    ask(tab, "   ")
    tab.wait_for_selector(".rc-notice")
    assert "Type a question" in tab.inner_text(".rc-notice")
    only(tab)
    ask(tab, "Read row 3.")
    tab.wait_for_function("document.querySelector('.rc-notice')?.innerText.includes('one way')")
    assert tab.get_by_label("Question").input_value() == "Read row 3.", "the question is kept"


def test_markup_in_a_question_is_shown_as_it_is(tab: Any) -> None:
    only(tab, "full")
    set_number(tab, "Longest answer, tokens", 2)
    nasty = "<img src=x onerror=document.title='!'> {{7*7}} ${8*8}"
    ask(tab, nasty)
    tab.wait_for_selector(".rc-turn h3")
    assert nasty in tab.inner_text(".rc-turn h3")
    tab.wait_for_selector("#ask:not([disabled])")
    assert tab.title() == "Raincheck"


def test_twenty_megapixel_photograph(tab: Any, tmp_path: Path, save: Callable[..., None]) -> None:
    data = pytest.importorskip("skimage.data", reason="scikit-image has the photograph")
    from PIL import Image

    photograph = Image.fromarray(data.astronaut()).resize((5472, 3648))
    photograph.save(tmp_path / "photo.jpg", quality=88)
    upload(tab, tmp_path / "photo.jpg")
    tab.wait_for_selector('#attached img[alt="photo.jpg"]')
    only(tab, "hard", "raincheck")
    set_number(tab, "Longest answer, tokens", 24)
    ask(tab, "What is in D5?")
    wait_done(tab, 1, ("hard", "raincheck"))
    total = sum(cells(tab, "raincheck").values())
    assert 900 < total <= 1024
    wait_restored(tab, total)
    save(tab, "photograph")


def test_short_video(tab: Any, tmp_path: Path, save: Callable[..., None]) -> None:
    av = pytest.importorskip("av", reason="PyAV writes the video")
    pictures = as_video([make_board(6, 6, seed) for seed in range(3)])
    with av.open(str(tmp_path / "boards.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 192, 192, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    upload(tab, tmp_path / "boards.mp4")
    tab.wait_for_selector('#attached img[alt="boards.mp4"]')
    ask(tab, "What is in D5 of frame 2?")
    wait_done(tab, 1)
    frames = tab.locator('.rc-view[data-way="raincheck"] svg').count()
    assert frames >= 2
    wait_restored(tab, 36 * frames)
    save(tab, "video")


def test_phone(open_tab: Callable[..., Any], save: Callable[..., None]) -> None:
    tab = open_tab({"width": 390, "height": 844})
    tab.get_by_role("button", name="Read row 3.").click()
    wait_done(tab, 1)
    wait_restored(tab, 64)
    wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "the page scrolls sideways"
    for control in ("Question", "Selector: chooses that share"):
        box = tab.get_by_label(control).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    tab.evaluate("scrollTo(0, 0)")
    save(tab, "phone")


def test_keyboard_alone(tab: Any, tmp_path: Path) -> None:
    """Tab reaches every control in order; Enter asks; Space and arrows set."""
    reached: list[str] = []
    tab.locator("body").click(position={"x": 2, "y": 2})
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.append(
            tab.evaluate(
                """() => {const e = document.activeElement;
                return e.ariaLabel || e.labels?.[0]?.innerText.trim() || e.innerText || e.id}"""
            )
        )
        if reached[-1].startswith("range slider for Longest"):
            break
    wanted = ["Add pictures or a video", "New board", "Question", "Ask", "Read the board.",
              "Clear conversation", "Model", "full", "range slider for Retention"]  # fmt: skip
    places = [next((i for i, name in enumerate(reached) if name.startswith(w)), -1) for w in wanted]
    assert -1 not in places, f"not reached: {wanted[places.index(-1)]} among {reached}"
    assert places == sorted(places)
    large_board(tab, tmp_path)
    tab.get_by_label("Question").focus()
    tab.keyboard.type("Read the board.")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(answer("full", 1, "writing"))
    tab.get_by_role("button", name="Stop").focus()
    tab.keyboard.press("Enter")
    wait_stopped(tab)


def test_every_control_has_a_label(tab: Any) -> None:
    unnamed = tab.evaluate(
        """() => [...document.querySelectorAll('input, textarea, select, button')]
        .filter(e => e.checkVisibility())
        .filter(e => !(e.ariaLabel || e.labels?.length || e.innerText.trim() || e.title))
        .map(e => e.outerHTML.slice(0, 120))"""
    )
    assert unnamed == []


def test_other_architecture(tab: Any) -> None:
    tab.get_by_label("Model").click()
    tab.get_by_role("option", name="qwen3_5").click()
    tab.wait_for_selector('#attached img[alt="board 2"]')
    ask(tab, "Read row 3.")
    assert all(wait_done(tab, 1).values())
    wait_restored(tab, 64)


def test_page_source_names_no_other_host(app: Any, tab: Any) -> None:
    source = tab.request.get(app.url).text()
    loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"([^\"]+)\"", source)
    assert loaded, "the pattern finds what a page loads"
    assert [url for url in loaded if re.match(r"(https?:)?//", url)] == []
