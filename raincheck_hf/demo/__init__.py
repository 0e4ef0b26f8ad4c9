"""`raincheck-hf demo`: the main job on the small models, without any download."""

from __future__ import annotations

import time
from pathlib import Path

from tqdm import tqdm

from raincheck_hf.bench import workers
from raincheck_hf.bench.checkpoints import load
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.settings import Settings
from raincheck_hf.bench.summary import summarise
from raincheck_hf.bench.tables import quality_tables
from raincheck_hf.demo.conversation import hold, transcript
from raincheck_hf.demo.picture import draw_conversation
from raincheck_hf.tiny import NAMES

SHOWN = "qwen3_5"
"""The model whose conversation is shown: the better reader of whole boards."""
SIZE = (8, 8)


def run_demo(out: Path, boards: int = 16, selector: str = "mmtok", seed: int = 0) -> list[Path]:
    """Measure, talk and draw, and say so meanwhile.

    Args:
        out: Folder for the pictures; created.
        boards: Boards for the table, four questions each.
        selector: Registered name.
        seed: Fixes boards and questions.

    Returns:
        The files written.

    Raises:
        ValueError: The selector is unknown, or `boards` is not positive.
    """
    if boards < 1:
        raise ValueError(f"boards must be 1 or more; got {boards}")
    start = time.monotonic()
    settings = Settings(
        boards=boards, reads=0, selectors=(selector,), seed=seed, only=("hard", "raincheck")
    )
    print(
        f"Two small models look at {boards} boards of {SIZE[0]}×{SIZE[1]} handwritten digits that "
        f"they were\nnot trained on, and answer {settings.turns} questions on each, one a turn.\n"
        "  full       sees the whole board\n"
        f"  hard       sees the {settings.retention:.0%} that {selector!r} selects, ever\n"
        "  raincheck  begins with the same cells, and restores the rest\n"
    )
    print(f"{quality_tables(summarise(_measure(settings)))}\n")
    print(f"One conversation with {SHOWN}, about cells that the first prefill left out.\n")
    held = hold(*load(SHOWN), SIZE, settings.config(selector, seed), seed)
    print(transcript(held))
    out.mkdir(parents=True, exist_ok=True)
    board, picture = out / "board.png", out / "restoration.png"
    held.board.image().save(board)
    draw_conversation(held, f"{SHOWN}, selector {selector}").save(picture)
    print(f"\nThe board alone:                        {board}")
    print(f"Selected, restored and pending cells:   {picture}")
    print(f"Done in {time.monotonic() - start:.0f} s. Ask for yourself:  raincheck-hf chat")
    print(f"  /image {board}\n  What is in D5?")
    return [board, picture]


def _measure(settings: Settings) -> list[Row]:
    rows: list[Row] = []
    work = [(job, settings.labels(job)) for job in settings.jobs()]
    for model in NAMES:
        own = [item for item in work if item[0].model == model]
        print(f"{model}: {len(own)} boards ...", flush=True)
        with tqdm(total=len(own), unit="board", disable=None, leave=False) as bar:
            for some in workers.run(settings, own, processes=1):
                rows += some
                bar.update()
    print()
    return rows
