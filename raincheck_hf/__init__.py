"""Deferred multimodal prefill for Hugging Face transformers (Raincheck, arXiv 2610.39562).

``model = enable_raincheck(model)``, then ``model.generate(**inputs, raincheck=True)``. Importing
this package changes nothing anywhere.
"""

from raincheck_hf.cache import RaincheckCache
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.generation import (
    RaincheckGenerationMixin,
    RaincheckOutput,
    disable_raincheck,
    enable_raincheck,
)
from raincheck_hf.report import RaincheckReport
from raincheck_hf.selection import register_selector
from raincheck_hf.session import RaincheckSession

__version__ = "0.1.0"

__all__ = [
    "RaincheckCache",
    "RaincheckConfig",
    "RaincheckGenerationMixin",
    "RaincheckOutput",
    "RaincheckReport",
    "RaincheckSession",
    "disable_raincheck",
    "enable_raincheck",
    "register_selector",
]
