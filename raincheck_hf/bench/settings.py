"""What a quality measurement runs, and the list of its rows, before any of them is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raincheck_hf.bench import checkpoints
from raincheck_hf.bench.ways import WAYS
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.selection import get_selector

Size = tuple[int, int]


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


@dataclass(frozen=True)
class Job:
    """One board on one model: a unit of work that a process takes.

    Attributes:
        task: The task.
        model: Name or path.
        board: The board's number.
    """

    task: Task
    model: str
    board: int


@dataclass(frozen=True)
class Settings:
    """A quality measurement.

    Attributes:
        models: Small models' names, or paths.
        selectors: Registered names.
        boards: Boards for questions about single cells.
        turns: Such questions a board, one a turn.
        size: Rows and columns of these boards.
        reads: Boards read as a whole.
        read_size: Rows and columns of those.
        retention: Fraction of visual tokens in the initial prefill.
        chunk_size: Deferred tokens a decode pass.
        guard_tokens: Plain decode passes first.
        seed: Fixes boards, questions and draws.
        device: Where to run.
        dtype: Of the parameters.
        only: Ways to run beside `full`; empty for all of a task's.
    """

    models: tuple[str, ...] = ("qwen3_vl", "qwen3_5")
    selectors: tuple[str, ...] = ("uniform", "random")
    boards: int = 200
    turns: int = 4
    size: Size = (8, 8)
    reads: int = 40
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
        cells = self.size[0] * self.size[1]
        if not 1 <= self.turns <= cells:
            raise ValueError(f"turns must be 1 to {cells}, the cells of a board; got {self.turns}")
        for name in ("boards", "reads", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)}")

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that have boards."""
        every = (
            Task("cells", self.boards, self.size, self.turns, ("hard", "raincheck", "uncorrected")),
            Task(
                "reading",
                self.reads,
                self.read_size,
                1,
                ("hard", "raincheck", "post_answer", "uncorrected"),
            ),
        )
        return tuple(task for task in every if task.boards)

    @cached_property
    def _weights(self) -> dict[str, str]:
        return {model: checkpoints.fingerprint(model) for model in self.models}

    @cached_property
    def _recurrent(self) -> dict[str, bool]:
        return {model: checkpoints.is_recurrent(model) for model in self.models}

    def ways(self, task: Task, model: str) -> tuple[str, ...]:
        """The ways of a task that mean something on a model."""
        ways = tuple(way for way in task.ways if not self.only or way in self.only)
        return tuple(way for way in ways if way != "uncorrected" or self._recurrent[model])

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
        """All units of work; models alternate, so that a run that is stopped has some of each."""
        for task in self.tasks:
            for board in range(task.boards):
                for model in self.models:
                    yield Job(task, model, board)

    def labels(self, job: Job) -> list[dict[str, Any]]:
        """The rows of a job, as far as they are known beforehand: the fields of `rows.KEY`."""
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
        pruned = {
            "retention": self.retention,
            "chunk_size": self.chunk_size,
            "guard_tokens": self.guard_tokens,
        }
        full = {"retention": 1.0, "chunk_size": None, "guard_tokens": None, "selector": None}
        labels = [{**common, **full, "way": "full"}]
        for selector in self.selectors:
            for way in self.ways(job.task, job.model):
                labels.append({**common, **pruned, "selector": selector, "way": way})
        return labels
