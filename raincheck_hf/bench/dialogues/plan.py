"""What a run over dialogues does, checked before any of it is done."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raincheck_hf.bench import checkpoints
from raincheck_hf.bench.dialogues.format import Dialogue, read_dialogues
from raincheck_hf.bench.ways import RECURRENT_ONLY, WAYS
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.selection import get_selector

RUN = (
    "model", "weights", "dtype", "device", "retention", "chunk_size", "guard_tokens", "seed",
    "max_new_tokens", "selector", "way",
)  # fmt: skip
"""Fields that say how a dialogue was run."""
KEY = ("dialogue", "digest", *RUN, "turn")
"""Fields that say what a row is about."""


@dataclass(frozen=True)
class Plan:
    """A run over dialogues.

    Attributes:
        data: The data file.
        model: A small model's name, or a checkpoint's folder.
        ways: Keys of `ways.WAYS`.
        selectors: Registered names; `full` needs none.
        retention: Fraction of visual tokens in the initial prefill.
        chunk_size: Deferred tokens a decode pass.
        guard_tokens: Plain decode passes first.
        max_new_tokens: Of turns that do not say it.
        seed: For selectors that draw.
        limit: How many dialogues from the start of the file; None for all.
        device: Where to run.
        dtype: Of the parameters.

    Raises:
        ValueError: Names what is wrong and what is allowed.
    """

    data: Path
    model: str = "qwen3_vl"
    ways: tuple[str, ...] = ("full", "hard", "raincheck")
    selectors: tuple[str, ...] = ("mmtok",)
    retention: float = 0.3
    chunk_size: int = 31
    guard_tokens: int = 16
    max_new_tokens: int = 512
    seed: int = 0
    limit: int | None = None
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.ways) - set(WAYS)):
            raise ValueError(f"unknown mode(s) {', '.join(unknown)}; known: {', '.join(WAYS)}")
        if not self.ways:
            raise ValueError(f"name at least one mode of {', '.join(WAYS)}")
        for selector in self.selectors:
            get_selector(selector)
        if not self.selectors and set(self.ways) != {"full"}:
            raise ValueError("every mode but full needs a selector")
        checkpoints.locate(self.model)
        checkpoints.check_device(self.device)
        self.config(self.selectors[0] if self.selectors else "uniform", self.seed)
        if self.limit == 0 or not self.dialogues:
            raise ValueError("there is nothing to run: no dialogue is within the limit")
        alien = sorted(set(self.ways) & set(RECURRENT_ONLY))
        if alien and not checkpoints.is_recurrent(self.model):
            raise ValueError(f"{self.model} has no recurrent layers, which {alien[0]} is about")

    @cached_property
    def dialogues(self) -> list[Dialogue]:
        """What is asked."""
        return read_dialogues(self.data)[: self.limit]

    def config(self, selector: str, draw: int) -> RaincheckConfig:
        """What raincheck itself runs with.

        Args:
            selector: A registered name.
            draw: Seed for selectors that draw.
        """
        return RaincheckConfig(
            retention=self.retention,
            selector=selector,
            chunk_size=self.chunk_size,
            guard_tokens=self.guard_tokens,
            # Restored at the barrier, in the same passes at every run.
            completion="lazy",
            seed=draw,
        )

    def draw(self, dialogue: Dialogue) -> int:
        """The seed of a dialogue's selections; the same in all ways."""
        if dialogue.seed is not None:
            return dialogue.seed
        digest = hashlib.sha256(f"{self.seed} {dialogue.id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def runs(self) -> Iterator[dict[str, Any]]:
        """How each dialogue is run: the fields of `RUN`, full first."""
        common = {
            "model": self.model,
            "weights": self._weights,
            "dtype": self.dtype,
            "device": self.device.partition(":")[0],
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
        }
        if "full" in self.ways:
            unused = {"chunk_size": None, "guard_tokens": None, "selector": None}
            yield {**common, "retention": 1.0, **unused, "way": "full"}
        pruned = {
            "retention": self.retention,
            "chunk_size": self.chunk_size,
            "guard_tokens": self.guard_tokens,
        }
        for selector in self.selectors:
            for way in self.ways:
                if way != "full":
                    yield {**common, **pruned, "selector": selector, "way": way}

    @cached_property
    def _weights(self) -> str:
        return checkpoints.fingerprint(self.model)
