"""Whether two devices compute alike and copy faithfully, without any model around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

# Rows of a decode step, of a step with a chunk, and of a prefill.
_ROWS = (1, 32, 360)
_COPIES = 50


def examine(first: str, second: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compare two devices.

    Args:
        first: A device.
        second: Another.
        dtype: To compute in.

    Returns:
        ``peers``: whether the GPUs read each other's memory, None elsewhere. ``copies``: whether
        rows came back unchanged from the second device, each time. ``linear`` and ``attention``:
        for each count of rows, whether both devices gave the same bits.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    weight, keys = normal(4096, 1024), normal(1, 8, 512, 128)
    rows = {count: (normal(count, 1024), normal(1, 8, count, 128)) for count in _ROWS}
    mask = torch.rand(max(_ROWS), 512, generator=draw) < 0.7
    mask[:, 0] = True  # a row that sees nothing has no answer

    def computed(device: str) -> dict[str, list[Tensor]]:
        there = [(x.to(device), q.to(device)) for x, q in rows.values()]
        w, k, seen = weight.to(device), keys.to(device), mask.to(device)
        return {
            "linear": [linear(x, w).cpu() for x, _ in there],
            "attention": [
                scaled_dot_product_attention(q, k, k, attn_mask=seen[: q.shape[2]]).cpu()
                for _, q in there
            ],
        }

    one, other = computed(first), computed(second)
    both_gpus = "cpu" not in (first, second)
    return {
        "peers": torch.cuda.can_device_access_peer(first, second) if both_gpus else None,
        "copies": _copies_come_back(first, second, dtype),
        **{
            name: {
                str(count): torch.equal(a, b)
                for count, a, b in zip(_ROWS, one[name], other[name], strict=True)
            }
            for name in one
        },
    }


def checksums(model: Any) -> dict[str, int]:
    """Sum of the bits of each parameter and buffer that is somewhere, by name."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "meta":  # offloaded
            bits = tensor.detach().reshape(-1).view(words[tensor.element_size()])
            found[name] = int(bits.sum(dtype=torch.int64))
    return found


def _copies_come_back(first: str, second: str, dtype: torch.dtype) -> bool:
    """Write, copy there and back, and reuse the memory at once, as layers on two devices do."""
    good = []
    for count in _ROWS:
        for value in range(_COPIES):
            rows = torch.full((count, 4096), value, dtype=dtype, device=first)
            good.append(((rows.to(second) + 1).to(first) == value + 1).all())
    return bool(torch.stack(good).all())
