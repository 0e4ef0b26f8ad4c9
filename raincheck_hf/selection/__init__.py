"""Selectors: which multimodal tokens are prefilled first. See docs/selectors.md."""

from raincheck_hf.selection import (  # noqa: F401  (each registers itself)
    cdpruner,
    divprune,
    evs,
    mmtok,
    random,
    saliency,
    scope,
    uniform,
    vidcom2,
    vispruner,
)
from raincheck_hf.selection.base import SCOPES, Selection, keep_count, select
from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.registry import (
    Selector,
    get_selector,
    is_built_in,
    list_selectors,
    register_selector,
)

__all__ = [
    "SCOPES",
    "Selection",
    "SelectionContext",
    "Selector",
    "get_selector",
    "is_built_in",
    "keep_count",
    "list_selectors",
    "register_selector",
    "select",
]
