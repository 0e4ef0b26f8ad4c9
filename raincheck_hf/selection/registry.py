"""Names for selectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from raincheck_hf.selection.context import SelectionContext

Selector = Callable[[SelectionContext], Tensor]
_F = TypeVar("_F", bound=Selector)

_SELECTORS: dict[str, Selector] = {}
_OWN_MODULES = __name__.rpartition(".")[0] + "."


def register_selector(name: str) -> Callable[[_F], _F]:
    """Decorator: make a selector known by name.

    A name registered again is replaced, so that a notebook cell can be run twice; the names of the
    built-in methods are kept.

    Raises:
        ValueError: the name is empty or belongs to a built-in method.
    """

    def add(function: _F) -> _F:
        taken = _SELECTORS.get(name)
        if not name or (taken is not None and is_built_in(taken)):
            raise ValueError(f"selector name {name!r} is empty or built in; choose another")
        _SELECTORS[name] = function
        return function

    return add


def get_selector(selector: str | Selector) -> Selector:
    """The selector of that name; a callable is returned as it is.

    Raises:
        ValueError: no selector of that name; the known ones are listed.
        TypeError: neither a name nor a callable.
    """
    if callable(selector):
        return selector
    if not isinstance(selector, str):
        raise TypeError(f"selector must be a name or a callable, got {type(selector).__name__}")
    if selector not in _SELECTORS:
        raise ValueError(f"unknown selector {selector!r}; known: {', '.join(list_selectors())}")
    return _SELECTORS[selector]


def list_selectors() -> list[str]:
    """All registered names, sorted."""
    return sorted(_SELECTORS)


def is_built_in(selector: str | Selector) -> bool:
    """Whether a selector is one of the package's own."""
    return str(getattr(get_selector(selector), "__module__", "")).startswith(_OWN_MODULES)


def selector_name(selector: str | Selector) -> str:
    """How to call a selector in a message."""
    if isinstance(selector, str):
        return selector
    return getattr(selector, "__qualname__", type(selector).__qualname__)
