"""What a quality measurement runs, and the list of its rows, before any of them is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from raincheck_hf.bench import checkpoints
from raincheck_hf.bench.ways import RECURRENT_ONLY, WAYS, config_of
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.selection import get_selector

Size = tuple[int, int]
Label = dict[str, Any]

SELECTORS = (
    "mmtok", "cdpruner", "divprune", "saliency", "vispruner", "scope", "uniform", "random",
)  # fmt: skip
"""Those for pictures. (On a picture the methods for video, `evs` and `vidcom2`, are `uniform`.)"""


@dataclass(frozen=True)
class Task:
    """One task's share of the settings.

    Attributes:
        name: A key of `tasks.TASKS`.
        boards: How many boards; 0 leaves the task out.
        size: Rows and columns of a board.
        turns: Questions a board.
        ways: What runs beside `full`, which needs no selector.
    """

    name: str
    boards: int
    size: Size
    turns: int
    ways: tuple[str, ...]

    @property
    def first_answer(self) -> int:
        """Digits of the first answer, which is what a conversation costs."""
        return self.size[0] * self.size[1] if self.name == "reading" else 1


@dataclass(frozen=True)
class Job:
    """One board on one model.

    Attributes:
        task: The task.
        model: Name or path.
        board: The board's number.
    """

    task: Task
    model: str
    board: int


class Measurement(Protocol):
    """What is needed to measure rows.

    Attributes:
        seed: Fixes boards, questions and draws.
        device: Where to run.
        dtype: Of the parameters.
    """

    @property
    def seed(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...

    def jobs(self) -> Iterable[Job]:
        """All boards on all models."""

    def labels(self, job: Job) -> list[Label]:
        """The rows of a job, as far as they are known beforehand: the fields of `rows.KEY`."""


@dataclass(frozen=True)
class Settings:
    """A quality measurement.

    Attributes:
        models: Small models' names, or paths.
        selectors: Registered names.
        boards: Boards for questions about single cells.
        turns: Such questions a board, one a turn.
        size: Rows and columns of these boards.
        reads: Boards read as a whole in the first turn.
        read_turns: Turns about these boards: the reading, then questions about cells.
        read_size: Rows and columns of those.
        retention: Fraction of visual tokens in the initial prefill.
        chunk_size: Deferred tokens a decode pass.
        guard_tokens: Plain decode passes first.
        seed: Fixes boards, questions and draws.
        device: Where to run.
        dtype: Of the parameters.
        only: Ways to run beside `full`; empty for those that a task has by itself.
    """

    models: tuple[str, ...] = ("qwen3_vl", "qwen3_5")
    selectors: tuple[str, ...] = SELECTORS
    boards: int = 200
    turns: int = 4
    size: Size = (8, 8)
    reads: int = 20
    read_turns: int = 4
    read_size: Size = (12, 12)
    retention: float = 0.3
    chunk_size: int = 31
    guard_tokens: int = 16
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse before anything runs.

        Raises:
            ValueError: Names what is wrong and what is allowed.
        """
        for selector in self.selectors:
            get_selector(selector)
        for model in self.models:
            checkpoints.locate(model)
        checkpoints.check_device(self.device)
        if unknown := sorted(set(self.only) - set(WAYS)):
            raise ValueError(f"unknown way(s) {', '.join(unknown)}; known: {', '.join(WAYS)}")
        self.config("random", 0)
        _check_turns("turns", self.turns, self.size[0] * self.size[1])
        _check_turns("read_turns", self.read_turns, self.read_size[0] * self.read_size[1] + 1)
        for name in ("boards", "reads", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)}")

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that have boards."""
        ways = {"cells": ("hard", "raincheck"), "reading": ("hard", "raincheck", "post_answer")}
        every = (
            Task("cells", self.boards, self.size, self.turns, self.only or ways["cells"]),
            Task(
                "reading", self.reads, self.read_size, self.read_turns, self.only or ways["reading"]
            ),
        )
        return tuple(task for task in every if task.boards)

    @cached_property
    def _weights(self) -> dict[str, str]:
        return {model: checkpoints.fingerprint(model) for model in self.models}

    @cached_property
    def _recurrent(self) -> dict[str, bool]:
        return {model: checkpoints.is_recurrent(model) for model in self.models}

    def config(self, selector: str, draw: int) -> RaincheckConfig:
        """What raincheck itself runs with; `lazy`, so that a last turn completes nothing."""
        return RaincheckConfig(
            retention=self.retention,
            selector=selector,
            chunk_size=self.chunk_size,
            guard_tokens=self.guard_tokens,
            completion="lazy",
            seed=draw,
        )

    def jobs(self) -> Iterator[Job]:
        """All boards; models alternate, so that a run that is stopped has some of each."""
        for task in self.tasks:
            for board in range(task.boards):
                for model in self.models:
                    yield Job(task, model, board)

    def labels(self, job: Job) -> list[Label]:
        """The full prefill, then every way with every selector."""
        points = [
            (way, self.config(selector, 0))
            for selector in self.selectors
            for way in ("full", *job.task.ways)
        ]
        return self.labels_of(job, points)

    def labels_of(self, job: Job, points: Iterable[tuple[str, RaincheckConfig]]) -> list[Label]:
        """Labels of ways, each with what raincheck itself runs with; none twice.

        A way that means nothing on the job's model is left out.
        """
        common = {
            "task": job.task.name,
            "model": job.model,
            "weights": self._weights[job.model],
            "dtype": self.dtype,
            "device": self.device.partition(":")[0],
            "size": list(job.task.size),
            "turns": job.task.turns,
            "seed": self.seed,
            "board": job.board,
        }
        labels = []
        for way, base in points:
            if way in RECURRENT_ONLY and not self._recurrent[job.model]:
                continue
            label = common | point_fields(way, base)
            if label not in labels:
                labels.append(label)
        return labels


def point_fields(way: str, base: RaincheckConfig) -> Label:
    """The fields of a label that say how a conversation is run; None where it does not matter.

    Args:
        way: A key of `WAYS`.
        base: What raincheck itself runs with.
    """
    config = config_of(way, base)
    whole, rides = config.retention == 1, config.defer == "decode"
    return {
        "retention": config.retention,
        "chunk_size": config.chunk_size if rides and not whole else None,
        "guard_tokens": config.guard_tokens if rides and not whole else None,
        "selector": None if whole else config.selector,
        "way": "full" if whole else way,
    }


def config_from(label: Mapping[str, Any], draw: int) -> RaincheckConfig:
    """What `point_fields` was made from, as far as it matters.

    Args:
        label: Holds its fields.
        draw: Seed for selectors that draw.
    """
    known = {name: label[name] for name in ("retention", "selector", "chunk_size", "guard_tokens")}
    fields = {name: value for name, value in known.items() if value is not None}
    return RaincheckConfig(**{"selector": "uniform", **fields}, completion="lazy", seed=draw)


def _check_turns(name: str, turns: int, most: int) -> None:
    if not 1 <= turns <= most:
        raise ValueError(f"{name} must be 1 to {most} on a board of this size; got {turns}")
