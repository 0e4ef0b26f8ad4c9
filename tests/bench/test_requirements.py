"""Recovery beside what it is asked to reach."""

from __future__ import annotations

from typing import Any

from raincheck_hf.bench.requirements import requirements_table
from raincheck_hf.bench.rows import KEY, Row


def row(way: str, first: float, later: int, board: int = 0, **fields: Any) -> Row:
    """A board of ten digits read, ``first`` of them right, and one question about a cell."""
    rides = way == "raincheck"
    tens = round(10 * first)
    own = {
        **dict.fromkeys(KEY), "task": "reading", "model": "m", "board": board, "way": way,
        "selector": None if way == "full" else "mmtok", "turns": 2,
        "retention": 1.0 if way == "full" else 0.3, "chunk_size": 31 if rides else None,
        "guard_tokens": 16 if rides else None, "selected": [0] if way != "full" else [0, 1],
        "right": [[1] * tens + [0] * (10 - tens), [later]], "said": ["7" * 10, "7"],
        "truth": ["7" * 10, "7"], "answer_tokens": [11, 2], "n_visual": 2,
        "restored_per_step": [1] if rides else [],
    }  # fmt: skip
    return own | fields


def board(number: int, first: float, later: int, **fields: Any) -> list[Row]:
    """What full, hard, post-answer and raincheck made of a board; the last as given."""
    return [
        row("full", 1.0, 1, number), row("hard", 0.2, 0, number),
        row("post_answer", 0.2, 1, number), row("raincheck", first, later, number, **fields),
    ]  # fmt: skip


def found(rows: list[Row]) -> dict[str, str]:
    """The only line of the table, by column; of columns with one name, the first."""
    table = requirements_table(rows)
    assert table is not None
    [line] = table.body
    return dict(reversed(list(zip(table.head, line, strict=True))))


def test_what_is_reached_and_what_is_not() -> None:
    good = found([*board(0, 0.9, 1), *board(1, 0.9, 1)])
    assert (good["≥ 0.90"], good["≥ 0.777"], good["above it"]) == ("yes", "yes", "yes")
    assert (good["first answer"], good["post-answer"]) == ("0.900", "0.200")
    later = found([*board(0, 0.9, 1), *board(1, 0.9, 0)])
    assert later["≥ 0.90"] == "no"
    # 0.6 of 0.8 lost in the first turn, all of the second: (0.6 + 1) / 1.8 of the loss.
    assert found(board(0, 0.8, 1))["all turns"].startswith("0.889 ")
    assert found(board(0, 0.5, 1))["≥ 0.777"] == "no"
    assert found(board(0, 0.2, 1))["above it"] == "no"


def test_dialogues_that_ended_in_the_guard_stand_apart() -> None:
    short = board(1, 0.2, 1, restored_per_step=[])
    apart = found([*board(0, 0.9, 1), *short])
    assert (apart["long first answers"], apart["ended in the guard"]) == ("1", "1")
    alone = found(board(0, 0.9, 1))
    for name in ("all turns", "first answer", "post-answer", "≥ 0.777"):
        assert apart[name] == alone[name]
    assert apart["all turns of these"].startswith("0.556 ")  # 1 of 1.8
    # A mark on later turns holds for them as for the others.
    assert found([*board(0, 0.9, 1), *board(1, 0.2, 0, restored_per_step=[])])["≥ 0.90"] == "no"
    none = found(short)
    assert (none["long first answers"], none["≥ 0.777"], none["above it"]) == ("0", "-", "-")


def test_questions_about_cells_count_for_later_turns() -> None:
    cells = [one | {"task": "cells"} for one in board(0, 0.2, 0)]
    whole = found([*board(0, 0.9, 1), *cells])
    assert whole["cells, turns 2+"].startswith("0.000 ") and whole["≥ 0.90"] == "no"


def test_no_table_without_both_ways() -> None:
    assert (
        requirements_table([one for one in board(0, 1, 1) if one["way"] != "post_answer"]) is None
    )
