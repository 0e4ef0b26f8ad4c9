"""Each dialogue as one conversation on one cache, in every way that was asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from raincheck_hf.bench.dialogues.format import Dialogue, Turn, Video
from raincheck_hf.bench.dialogues.plan import KEY, Plan
from raincheck_hf.bench.dialogues.scoring import own_score
from raincheck_hf.bench.rows import Row, RowFile, key_of
from raincheck_hf.bench.ways import circumstances, config_of
from raincheck_hf.report import RaincheckReport
from raincheck_hf.session import RaincheckSession

Label = dict[str, Any]


def labels(dialogue: Dialogue, run: Mapping[str, Any]) -> list[Label]:
    """The fields of `plan.KEY` for each turn of a dialogue, from turn 1.

    Args:
        dialogue: What is asked.
        run: How, as `Plan.runs` makes it.
    """
    about = {"dialogue": dialogue.id, "digest": dialogue.digest, **run}
    return [{**about, "turn": turn + 1} for turn in range(len(dialogue.turns))]


@dataclass(frozen=True)
class Runner:
    """Runs what a file of rows does not hold yet.

    Attributes:
        plan: What to run.
        model: Enabled.
        processor: Its processor.
        file: Rows so far, told apart by `plan.KEY`; added to as soon as a turn is answered.
        origin: What every row says of where it comes from.
        progress: Called for each turn of the plan, when its row is there.
    """

    plan: Plan
    model: Any
    processor: Any
    file: RowFile
    origin: Mapping[str, Any]
    progress: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Run all of it.

        A dialogue of which the file holds the first turns is started again, since their keys
        and values are gone, and goes on from there if the answers are the same.

        Raises:
            RuntimeError: They are not, or two ways were not given the same selection.
        """
        for dialogue in self.plan.dialogues:
            for run in self.plan.runs():
                turns = labels(dialogue, run)
                if all(key_of(one, KEY) in self.file for one in turns):
                    for _ in turns:
                        self.progress()
                else:
                    self._converse(dialogue, turns)
            self._check_selections(dialogue)

    def _converse(self, dialogue: Dialogue, turns: list[Label]) -> None:
        way, selector = turns[0]["way"], turns[0]["selector"]
        base = self.plan.config(selector or "uniform", self.plan.draw(dialogue))
        session = RaincheckSession(
            self.model, self.processor, config_of(way, base), dialogue.system
        )
        try:
            with circumstances(way):
                for turn, about in zip(dialogue.turns, turns, strict=True):
                    said = self._ask(session, turn)
                    known = self._known(about)
                    if known is None:
                        result = _result(dialogue, turn, said, session.report)
                        self.file.append([{**about, **result, **self.origin}])
                    elif known["said"] != said:
                        raise RuntimeError(
                            f"{dialogue.id!r}, turn {about['turn']}, {way}: {self.file.path} "
                            f"has the answer {known['said']!r}, and asked again to go on from it "
                            f"the model says {said!r}; the file comes from other software or "
                            f"another machine, so write to a new one"
                        )
                    self.progress()
        finally:
            session.close()

    def _ask(self, session: RaincheckSession, turn: Turn) -> str:
        folder = self.plan.data.parent
        return session.ask(
            turn.question,
            images=[folder / path for path in turn.images],
            videos=[_loaded(folder, video) for video in turn.videos],
            max_new_tokens=turn.max_new_tokens or self.plan.max_new_tokens,
            do_sample=False,
        )

    def _known(self, about: Label) -> Row | None:
        return next(iter(self.file.rows([key_of(about, KEY)])), None)

    def _check_selections(self, dialogue: Dialogue) -> None:
        """Hard and raincheck are compared on the same selections or not at all."""
        seen: dict[tuple[str, int], str] = {}
        for run in self.plan.runs():
            for about in labels(dialogue, run):
                row = self._known(about)
                if row is None or run["way"] == "full":
                    continue
                name = (run["selector"], about["turn"])
                if seen.setdefault(name, row["selection"]) != row["selection"]:
                    raise RuntimeError(
                        f"{dialogue.id!r}, turn {about['turn']}: selector {run['selector']!r} "
                        f"chose other tokens for {run['way']!r} than before; it is not "
                        f"deterministic, and ways cannot be compared"
                    )


def _loaded(folder: Path, video: Video) -> Any:
    if isinstance(video, str):
        return folder / video
    return [Image.open(folder / path).convert("RGB") for path in video]


def _result(dialogue: Dialogue, turn: Turn, said: str, report: RaincheckReport | None) -> Row:
    """What a row says beside its label; all that a judge needs is among it."""
    assert report is not None  # a turn has just run
    every = sorted([*report.selected.tolist(), *report.deferred.tolist()])
    rank = {at: number for number, at in enumerate(every)}
    # Which of the turn's new visual tokens, whatever stood before them.
    selected = ",".join(str(rank[at]) for at in report.selected.tolist())
    return {
        "turns": len(dialogue.turns),
        "question": turn.question,
        "said": said,
        "reference": turn.reference,
        "scoring": turn.scoring,
        "score": own_score(turn, said),
        "category": turn.category or dialogue.category,
        "context": dialogue.context,
        "images": list(turn.images),
        "checklist": [vars(check) for check in turn.checklist],
        "n_visual": report.n_visual,
        "n_selected": report.n_selected,
        "selection": hashlib.sha256(selected.encode()).hexdigest()[:12],
        "restored_in_answer": report.restored_in_answer,
        "ttft_ms": report.ttft_ms,
        "tpot_ms": report.tpot_ms,
    }
