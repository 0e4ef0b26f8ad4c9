"""What a harness passes as flat arguments, as a configuration. Plain Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raincheck_hf.config import RaincheckConfig

MODES: Mapping[str, Mapping[str, Any]] = {
    "full": {"retention": 1.0},
    "hard": {"defer": "never"},
    "raincheck": {},
}
"""What each mode fixes. A field that a mode fixes cannot be given another value beside it."""

FIELDS = tuple(field.name for field in dataclasses.fields(RaincheckConfig))
"""Arguments that are fields of `RaincheckConfig`."""


def config_of(fields: Mapping[str, Any], mode: str = "raincheck") -> RaincheckConfig:
    """The configuration that flat arguments describe.

    Args:
        fields: Fields of `RaincheckConfig` by name; missing ones take their defaults.
        mode: `"full"`, `"hard"` or `"raincheck"`.

    Raises:
        ValueError: An unknown mode or field, a value out of range, or a field that contradicts the
            mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    fixed = MODES[mode]
    for name, value in fixed.items():
        if name in fields and fields[name] != value:
            raise ValueError(
                f"mode={mode} means {name}={value}; got {name}={fields[name]} beside it: "
                f"leave one of them out"
            )
    return RaincheckConfig.from_dict({**fields, **fixed})


def without_next_turn(config: RaincheckConfig) -> RaincheckConfig:
    """The same for a question that nothing follows: nothing is restored after its answer."""
    return config.replace(completion="lazy") if config.completion == "background" else config
