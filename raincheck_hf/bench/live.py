"""Bytes of live tensors by what they are for (§A.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from raincheck_hf.buffers import KeyValueBuffer, Rows
from raincheck_hf.recurrent import RecurrentState

COMPONENTS = ("weights", "kv", "recurrent", "maps", "staged")
"""Parameters and buffers; keys and values, reserved slots included; recurrent states and what is
kept for boundary repair; suffix maps; deferred rows that wait, DeepStack among them."""

_OWN = "raincheck_hf."


def live_bytes(model: Any, cache: Any) -> dict[str, int]:
    """Bytes that a model and one conversation hold, whole allocations, none counted twice.

    Args:
        model: The model.
        cache: A `RaincheckCache` of it; during a turn it also holds what a broken turn would go
            back to.

    Returns:
        A number for each of `COMPONENTS`.
    """
    found: dict[str, dict[int, int]] = {component: {} for component in COMPONENTS}
    counted: set[int] = set()
    tensors = [*(("weights", tensor) for tensor in _weights(model)), *_held(cache)]
    for component, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            found[component][storage.data_ptr()] = storage.nbytes()
    return {component: sum(sizes.values()) for component, sizes in found.items()}


def _weights(model: Any) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _held(cache: Any) -> Iterator[tuple[str, Tensor]]:
    for part in (cache.buffers, cache.conversation, cache.broken_off):
        yield from _walk(part, None)


def _walk(thing: Any, component: str | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor below ``thing`` that belongs to a component, with its component."""
    if isinstance(thing, Tensor):
        if component is not None:
            yield component, thing
    elif isinstance(thing, RecurrentState):
        for name, value in vars(thing).items():
            yield from _walk(value, "maps" if name == "phi" else "recurrent")
    elif isinstance(thing, KeyValueBuffer):
        yield from _walk(vars(thing), "kv")
    elif isinstance(thing, Rows):
        yield from _walk(vars(thing), "staged")
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _walk(value, component)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _walk(value, component)
    elif type(thing).__module__.startswith(_OWN) and hasattr(thing, "__dict__"):
        yield from _walk(vars(thing), component)
