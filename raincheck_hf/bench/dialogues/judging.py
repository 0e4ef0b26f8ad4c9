"""`raincheck-hf bench judge`: verdicts on the answers that need one, and the figures they make."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from raincheck_hf.bench.dialogues.format import JUDGED
from raincheck_hf.bench.dialogues.judge import BadVerdict, Judge
from raincheck_hf.bench.dialogues.plan import KEY
from raincheck_hf.bench.dialogues.report import open_rows, report_rows
from raincheck_hf.bench.dialogues.summary import Line
from raincheck_hf.bench.rows import Row, RowFile, key_of

VERDICT_KEY = (*KEY, "judge", "prompt", "shown")
"""Fields that tell one verdict from another."""


def report_judging(judge: Judge, answers: Path, out: Path, workers: int = 4) -> list[Line]:
    """Have every answer judged that has no verdict yet, and print a table over all answers.

    Answers whose score needs no judge keep it. An answer on which no reply was usable stays
    without a verdict, and is asked about again the next time.

    Args:
        judge: Who judges.
        answers: A file of `bench dialogues`.
        out: The file of verdicts; created, or added to. `NAME.summary.json` gets the figures.
        workers: Requests at a time.

    Returns:
        The figures.

    Raises:
        ValueError: The file holds no answers.
        EndpointError: The endpoint gave up; what was judged until then is kept.
    """
    rows = list(open_rows(answers))
    if not rows:
        raise ValueError(f"{answers} holds no answers of bench dialogues")
    file = RowFile(out, VERDICT_KEY)
    if file.unreadable:
        print(f"{out}: {file.unreadable} unreadable line(s) left alone", file=sys.stderr)
    wanted = [talk for talk in conversations(rows) if talk[-1]["scoring"] in JUDGED]
    todo = [talk for talk in wanted if _key(judge, talk[-1]) not in file]
    print(f"{len(wanted)} answers to judge, {len(wanted) - len(todo)} of them already in {out}")
    failed = 0
    with tqdm(total=len(todo), unit="answer", disable=None, smoothing=0.05) as bar:
        for row, verdict in _verdicts(judge, todo, workers):
            if isinstance(verdict, BadVerdict):
                failed += 1
                where = f"{row['dialogue']!r}, turn {row['turn']}, {row['way']}"
                print(f"no verdict on {where}: {verdict}", file=sys.stderr)
            else:
                about = {field: row[field] for field in KEY}
                file.append([{**about, **judge.about(row), **verdict}])
            bar.update(1)
    if failed:
        print(f"{failed} answers got no usable verdict; run it again to ask about them again")
    return report_rows([_judged(judge, row, file) for row in rows], out)


def conversations(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """For each row, the rows of its conversation up to it, in order."""
    talks: dict[str, dict[int, Row]] = {}
    fields = [field for field in KEY if field != "turn"]
    for row in rows:
        talks.setdefault(key_of(row, fields), {})[row["turn"]] = row
    for talk in talks.values():
        ordered = [talk[turn] for turn in sorted(talk)]
        for at in range(len(ordered)):
            yield ordered[: at + 1]


def _verdicts(
    judge: Judge, todo: Sequence[Sequence[Row]], workers: int
) -> Iterator[tuple[Row, Mapping[str, Any] | BadVerdict]]:
    """Each row with its verdict, as soon as it is there."""
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(judge.score, talk): talk[-1] for talk in todo}
        try:
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, BadVerdict):
                    raise error
                yield futures[future], error or future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _key(judge: Judge, row: Row) -> str:
    return key_of({**row, **judge.about(row)}, VERDICT_KEY)


def _judged(judge: Judge, row: Row, file: RowFile) -> Row:
    if row["scoring"] not in JUDGED:
        return row
    verdict = next(iter(file.rows([_key(judge, row)])), None)
    return row if verdict is None else {**row, "score": verdict["score"]}
