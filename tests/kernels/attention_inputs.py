"""Random passes of an attention layer, with rubbish wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raincheck_hf.kernels.attention import Lengths
from raincheck_hf.kernels.descriptor import HEADER, RECORD_SIZE


@dataclass(frozen=True)
class Shape:
    """An attention layer's sizes and conventions."""

    kv_heads: int
    group: int
    dim: int
    half: int
    offset: int
    gated: bool

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group


# Groups of 1, 4 and 7; whole and partial rotation, one of them not a power of two.
SHAPES = [
    Shape(kv_heads=2, group=1, dim=32, half=16, offset=0, gated=False),
    Shape(kv_heads=2, group=4, dim=64, half=8, offset=1, gated=True),
    Shape(kv_heads=1, group=7, dim=16, half=6, offset=0, gated=True),
]
ROWS = [1, 3, 7, 31, 33, 63, 75]


def passes(shape: Shape) -> list[tuple[int, int, Lengths]]:
    """Row counts, a seed, and lengths: all kinds of pass for one shape, one kind for the others."""
    found = []
    for rows in ROWS:
        kinds = list(enumerate(lengths_for(rows)))
        if shape is not SHAPES[1]:
            kinds = [kinds[(rows + SHAPES.index(shape)) // 2 % len(kinds)]]
        found += [(rows, seed, lengths) for seed, lengths in kinds]
    return found


def lengths_for(rows: int) -> list[Lengths]:
    """Passes of `rows` = capacity + 1 rows: chunk full or not, or empty; decode row or not."""
    capacity = rows - 1
    found = [
        # A gap, and an answer that has begun.
        Lengths(
            prefix=97 + rows, chunk=capacity, answer=150 + 2 * rows, end=173 + 2 * rows, token=True
        ),
        # Hardly any keys: splits without work. No gap behind the chunk, the answer's first row.
        Lengths(prefix=1, chunk=capacity // 2, answer=1 + capacity, end=1 + capacity, token=True),
    ]
    if capacity:
        part = max(1, capacity * 2 // 3)
        answer = 60 + rows
        found.append(Lengths(prefix=33, chunk=part, answer=answer, end=answer + 4, token=False))
        found.append(Lengths(prefix=201, chunk=0, answer=290, end=298, token=True))
    return found


class RandomPass:
    """One pass's tensors. Rows not in use are NaN; so is what is to be written.

    Attributes:
        q: [T, Hq, dim], cut from a projection [T, Hq · 2 · dim] that holds the gate too.
        gate: [T, Hq, dim] or None.
        k: [T, H, dim], cut from a projection that holds v too.
        v: [T, H, dim].
        keys: [H, slots, dim], with NaN-free rubbish in slots that nobody sees.
        values: [H, slots, dim].
        header: int64.
        record: int64.
    """

    eps = 1e-6

    def __init__(
        self,
        shape: Shape,
        rows: int,
        lengths: Lengths,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
        positions_below: int = 5000,
    ) -> None:
        generator = torch.Generator().manual_seed(seed + rows)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype).to(device)

        self.shape, self.rows, self.lengths = shape, rows, lengths
        self.capacity = rows - 1
        used, _ = lengths.used(self.capacity)
        unused = [row for row in range(rows) if row not in used]
        heads, dim = shape.query_heads, shape.dim
        wide = draw(rows, heads, 2 * dim)
        wide[unused] = torch.nan
        self.q, self.gate = wide[..., :dim], wide[..., dim:] if shape.gated else None
        both = 0.5 + 1.5 * draw(rows, 2 * shape.kv_heads, dim)
        both[unused] = torch.nan
        self.k, self.v = both[:, : shape.kv_heads], both[:, shape.kv_heads :]
        self.q_weight = 0.3 + 0.5 * draw(dim)
        self.k_weight = 0.8 + 0.5 * draw(dim)
        slots = max(lengths.end + 1, lengths.prefix + lengths.chunk) + 5
        self.keys, self.values = draw(shape.kv_heads, slots, dim), draw(shape.kv_heads, slots, dim)
        # Sharp enough that a key too many or too few shows.
        self.keys *= 2
        self.scale = dim**-0.5
        limit = positions_below
        self.positions = torch.randint(0, limit, (3, rows), generator=generator).to(device)
        self.inv_freq = (10000.0 ** -(torch.arange(shape.half) / shape.half)).to(device)
        self.axis = (torch.arange(shape.half, dtype=torch.int32) % 3).to(device)
        self.header = torch.zeros(HEADER.value, dtype=torch.int64)
        values = (lengths.prefix, lengths.chunk, lengths.answer, lengths.end, int(lengths.token))
        self.header[:5] = torch.tensor(values)
        self.header[10:13] = self.positions[:, -1]
        self.header = self.header.to(device)
        self.record = torch.zeros(RECORD_SIZE.value, dtype=torch.int64, device=device)
        self.point_at(self.keys, self.values)

    def point_at(self, keys: Tensor, values: Tensor) -> None:
        """Write the record for these buffers."""
        entries = (keys.data_ptr(), values.data_ptr(), keys.stride(0))
        self.record[:3] = torch.tensor(entries, device=self.record.device)

    def hidden_slots(self) -> list[int]:
        """Slots that no row sees."""
        seen = self.lengths.visible(self.capacity, self.keys.shape[1]).any(0)
        return (~seen).nonzero().squeeze(1).tolist()
