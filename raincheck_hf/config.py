"""What the user chose: one frozen, validated dataclass. Imports no model code."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_CHOICES: dict[str, tuple[str, ...]] = {
    "retention_scope": ("prompt", "item", "frame"),
    "defer": ("decode", "post_answer", "never"),
    "order": ("source", "relevance"),
    "completion": ("background", "blocking", "lazy"),
    "executor": ("auto", "modules", "fused"),
}

# field: (smallest, largest or None)
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "chunk_size": (1, 511),
    "guard_tokens": (0, None),
    "completion_chunk_size": (1, None),
    "seed": (0, None),
}


@dataclass(frozen=True)
class RaincheckConfig:
    """How one turn is prefilled and restored.

    Attributes:
        retention: Fraction of multimodal tokens in the initial prefill, in (0, 1]. With 1 nothing
            is deferred and the result is stock ``generate``'s.
        selector: Registered name of a pruning method, or a callable
            ``(SelectionContext) -> scores [n] or bool mask [n]``.
        retention_scope: Over what the fraction is taken: the ``"prompt"``'s new multimodal tokens,
            each ``"item"`` (image or video), or each ``"frame"``.
        defer: ``"decode"`` restores during decode and after the answer (the paper),
            ``"post_answer"`` only after it (section D.6), ``"never"`` drops (hard pruning).
        chunk_size: Deferred tokens restored in one decode pass, 1 to 511.
        guard_tokens: Plain decode passes before the first chunk, 0 or more.
        order: ``"source"``, or ``"relevance"`` to restore the highest scores first.
        completion: When the rest is restored after the answer: in the ``"background"``,
            ``"blocking"`` before ``generate`` returns, or ``"lazy"``, when next needed.
        completion_chunk_size: Deferred tokens restored in one completion pass, 1 or more.
        executor: ``"modules"`` runs the model's own layers; ``"fused"`` runs Triton kernels and
            captured steps on its weights, and is refused where it cannot. ``"auto"`` takes fused
            for plain bf16 or fp16 weights on one CUDA device, else modules, and logs which and why.
        fuse: Chunk and decode row in one pass; False runs them one after the other (ablation).
        seed: Seed for selectors that draw, 0 or more.

    Raises:
        ValueError: A value has the wrong type or is out of range; names field, value and range.
    """

    retention: float = 0.3
    selector: str | Callable[..., Any] = "mmtok"
    retention_scope: str = "prompt"
    defer: str = "decode"
    chunk_size: int = 31
    guard_tokens: int = 16
    order: str = "source"
    completion: str = "background"
    completion_chunk_size: int = 256
    executor: str = "auto"
    fuse: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_retention()
        self._check_selector()
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}; got {value!r}")
        for field, (low, high) in _INTEGERS.items():
            self._check_integer(field, low, high)
        if not isinstance(self.fuse, bool):
            raise ValueError(f"fuse must be True or False; got {self.fuse!r}")

    def _check_retention(self) -> None:
        value = self.retention
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"retention must be a number in (0, 1]; got {value!r}")
        object.__setattr__(self, "retention", float(value))
        if math.isnan(value) or not 0 < value <= 1:
            raise ValueError(f"retention must be in (0, 1]; got {value!r}")

    def _check_selector(self) -> None:
        if callable(self.selector):
            return
        if not isinstance(self.selector, str):
            raise ValueError(
                f"selector must be a registered name or a callable; got {self.selector!r}"
            )
        from raincheck_hf.selection import get_selector

        get_selector(self.selector)  # an unknown name raises here and lists the known ones

    def _check_integer(self, field: str, low: int, high: int | None) -> None:
        value = getattr(self, field)
        wanted = f"{low} or more" if high is None else f"{low} to {high}"
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{field} must be an integer, {wanted}; got {value!r}")
        value = int(value)
        object.__setattr__(self, field, value)
        if value < low or (high is not None and value > high):
            raise ValueError(f"{field} must be {wanted}; got {value!r}")

    @property
    def drops(self) -> bool:
        """Whether deferred tokens are never restored (hard pruning)."""
        return self.defer == "never"

    def replace(self, **changes: Any) -> RaincheckConfig:
        """A copy with some fields changed; validated again."""
        return self.from_dict({**_fields_of(self), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-ready fields.

        Raises:
            ValueError: The selector is a callable, which has no plain form.
        """
        if not isinstance(self.selector, str):
            raise ValueError(
                f"selector {self.selector!r} is a callable and cannot be saved; "
                "register it with register_selector and use its name"
            )
        return _fields_of(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RaincheckConfig:
        """The inverse of ``to_dict``; missing fields take their defaults.

        Raises:
            ValueError: An unknown field; lists the known ones.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(
                f"unknown raincheck field(s) {', '.join(map(repr, unknown))}; "
                f"known: {', '.join(known)}"
            )
        return cls(**fields)

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_dict`` as JSON."""
        text = json.dumps(self.to_dict(), indent=2)  # may raise; the file is not touched before
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> RaincheckConfig:
        """Read a file that ``to_json_file`` wrote."""
        with open(path, encoding="utf-8") as file:
            return cls.from_dict(json.load(file))

    @classmethod
    def resolve(cls, choice: Any, default: RaincheckConfig) -> RaincheckConfig | None:
        """Turn what was passed as ``raincheck=`` into a config, or None for a stock run.

        Args:
            choice: True, False, None, a config, or a dict of its fields.
            default: What True means, and what a dict's missing fields take.

        Raises:
            TypeError: Anything else was passed.
        """
        if choice is None or choice is False:
            return None
        if choice is True:
            return default
        if isinstance(choice, cls):
            return choice
        if isinstance(choice, Mapping):
            return default.replace(**choice)
        raise TypeError(
            "raincheck= takes True, False, None, a RaincheckConfig or a dict of its fields; "
            f"got {type(choice).__name__}"
        )


def _fields_of(config: RaincheckConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
