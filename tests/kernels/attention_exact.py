"""An attention layer's arithmetic in float64, a row and a head at a time. Shares no code."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def seen_slots(row: int, capacity: int, prefix: int, answer: int, end: int) -> list[int]:
    """Slots that a row in use sees."""
    if row == capacity:
        return list(range(prefix)) + list(range(answer, end + 1))
    return list(range(prefix + row + 1))


def slot_of(row: int, capacity: int, prefix: int, end: int) -> int:
    return end if row == capacity else prefix + row


def rows_in_use(capacity: int, chunk: int, token: int) -> list[int]:
    return [row for row in range(capacity + 1) if row < chunk or (row == capacity and token)]


def angles(position: list[int], inv_freq: Tensor, axis: Tensor) -> list[float]:
    """Of one row."""
    return [
        position[which] * frequency
        for which, frequency in zip(axis.tolist(), inv_freq.double().tolist(), strict=True)
    ]


def turned(x: Tensor, weight: Tensor, offset: int, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """One vector [dim], normalised and rotated."""
    x, weight = x.double(), weight.double()
    x = x / math.sqrt(float((x * x).mean()) + eps) * (offset + weight)
    half = len(cos)
    # Each pair of a dim and the one half a rotation behind is a number in the complex plane.
    number = torch.complex(x[:half], x[half : 2 * half]) * torch.complex(cos.double(), sin.double())
    return torch.cat([number.real, number.imag, x[2 * half :]])


def attended(q: Tensor, keys: Tensor, values: Tensor, slots: list[int], scale: float) -> Tensor:
    """One query [dim] over some slots of one head's keys and values [slots, dim]."""
    scores = keys[slots].double() @ q.double() * scale
    return torch.softmax(scores, 0) @ values[slots].double()
