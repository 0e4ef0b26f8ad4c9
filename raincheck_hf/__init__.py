"""Deferred multimodal prefill for Hugging Face transformers (Raincheck, arXiv 2610.39562).

``model = enable_raincheck(model)``, then ``model.generate(**inputs, raincheck=True)``. Importing
this package changes nothing anywhere; torch and transformers are imported with the first name used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from raincheck_hf.cache import RaincheckCache
    from raincheck_hf.config import RaincheckConfig
    from raincheck_hf.generation import (
        RaincheckGenerationMixin,
        RaincheckOutput,
        disable_raincheck,
        enable_raincheck,
    )
    from raincheck_hf.report import RaincheckReport
    from raincheck_hf.selection import list_selectors, register_selector
    from raincheck_hf.session import RaincheckSession

_HOMES = {
    "RaincheckCache": "cache",
    "RaincheckConfig": "config",
    "RaincheckGenerationMixin": "generation",
    "RaincheckOutput": "generation",
    "RaincheckReport": "report",
    "RaincheckSession": "session",
    "disable_raincheck": "generation",
    "enable_raincheck": "generation",
    "list_selectors": "selection",
    "register_selector": "selection",
}

__all__ = [
    "RaincheckCache",
    "RaincheckConfig",
    "RaincheckGenerationMixin",
    "RaincheckOutput",
    "RaincheckReport",
    "RaincheckSession",
    "disable_raincheck",
    "enable_raincheck",
    "list_selectors",
    "register_selector",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
