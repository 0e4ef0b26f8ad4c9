"""Replacing methods on one instance, and putting back what was there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

_PREVIOUS = "_raincheck_previous"
_MARK = "__raincheck__"


def bind(target: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let ``target.name(...)`` call ``replacement(target, *args, **kwargs)``; idempotent.

    The replacement looks and pickles like what it replaces: it has its name and signature. An
    instance attribute that was there before (an accelerate hook, say) is kept, for ``previous``.
    """
    if name in target.__dict__.get(_PREVIOUS, {}) and not _is_own(target, name):
        return  # ours, or ours inside a wrapper that came later
    before = None if _is_own(target, name) else target.__dict__.get(name)

    @functools.wraps(getattr(type(target), name))
    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, *args, **kwargs)

    setattr(bound, _MARK, True)
    target.__dict__.setdefault(_PREVIOUS, {})[name] = before
    target.__dict__[name] = MethodType(bound, target)


def is_bound(target: Any, name: str) -> bool:
    """Whether ``target.name`` is a replacement made here, and nobody wrapped it since."""
    method = target.__dict__.get(name)
    return isinstance(method, MethodType) and hasattr(method.__func__, _MARK)


def _is_own(target: Any, name: str) -> bool:
    """Whether the instance has just its class's method: no attribute, or what unpickling leaves."""
    method = target.__dict__.get(name)
    if method is None:
        return True
    return isinstance(method, MethodType) and method.__func__ is getattr(type(target), name)


def previous(target: Any, name: str) -> Callable[..., Any]:
    """What ``target.name`` was before ``bind``."""
    before = target.__dict__.get(_PREVIOUS, {}).get(name)
    return before if before is not None else getattr(type(target), name).__get__(target)


def unbind(target: Any, name: str) -> None:
    """Put back what was there before ``bind``; nothing to do where nothing was bound.

    Raises:
        RuntimeError: Someone wrapped the replacement later; undoing it would drop their wrapper.
    """
    kept = target.__dict__.get(_PREVIOUS, {})
    if name not in kept:
        return
    if not is_bound(target, name) and not _is_own(target, name):
        raise RuntimeError(
            f"{type(target).__name__}.{name} was wrapped after enable_raincheck (an accelerate "
            "hook, for example); remove that wrapper first, then call disable_raincheck again"
        )
    before = kept.pop(name)
    if before is None:
        target.__dict__.pop(name, None)
    else:
        target.__dict__[name] = before
    if not kept:
        del target.__dict__[_PREVIOUS]
