"""How the attention of one pass is cut into programs. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

PROCESSORS = 132
"""Programs to aim at: the processors of an H200."""


@dataclass(frozen=True)
class AttentionPlan:
    """Sizes of the launches; all are fixed in a captured graph.

    Attributes:
        splits: programs that share the keys of one key head and one block of rows.
        vectors: query vectors of a program, a power of two from 16: rows times the group's heads.
        keys: keys that a program reads at a time, a power of two from 16.
        warps: of a program.
        stages: blocks of keys under way at a time.
        last_merges: the split that ends last merges, in the same launch; else a second launch does.
        merge_vectors: query vectors that a program of the second launch merges, a power of two.
        merge_warps: of a program of the second launch.
    """

    splits: int
    vectors: int
    keys: int = 64
    warps: int = 4
    stages: int = 2
    last_merges: bool = False
    merge_vectors: int = 1
    merge_warps: int = 2

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot be compiled for."""
        powers = (self.vectors, self.keys, self.warps, self.merge_vectors, self.merge_warps)
        if any(size < 1 or size & (size - 1) for size in powers):
            raise ValueError(f"sizes other than splits and stages must be powers of two: {self}")
        if self.vectors < 16 or self.keys < 16 or self.splits < 1 or self.stages < 1:
            raise ValueError(f"vectors and keys must be 16 or more, splits and stages 1: {self}")

    def rows(self, group: int) -> int:
        """Rows of a block, for `group` query heads a key head.

        Raises:
            ValueError: a row's heads do not fit a block.
        """
        if group > self.vectors:
            raise ValueError(f"{group} query heads a key head need as many vectors: {self}")
        return self.vectors // group

    def row_blocks(self, rows: int, group: int) -> int:
        """Blocks for `rows` rows."""
        return -(-rows // self.rows(group))


def plan_attention(
    rows: int, query_heads: int, kv_heads: int, dim: int, itemsize: int = 2
) -> AttentionPlan:
    """A plan for `rows` = capacity + 1 rows; `dataclasses.replace` changes a part of it.

    Args:
        rows: of the launch, used or not.
        query_heads: Hq.
        kv_heads: H.
        dim: of a head.
        itemsize: bytes of an element of q, keys and values.
    """
    group = query_heads // kv_heads
    if itemsize > 2:  # the tensor cores make no exact products: everything is in registers
        widest, keys, stages = 16, 16, 1
    elif dim <= 128:
        widest, keys, stages = 128, 64, 3
    else:
        widest, keys, stages = 64, 32, 3
    vectors = max(min(_power(rows * group), widest), _power(group), 16)
    blocks = kv_heads * -(-rows // (vectors // group))
    return AttentionPlan(
        splits=1 << (max(1, PROCESSORS // blocks).bit_length() - 1),
        vectors=vectors,
        keys=keys,
        warps=8 if vectors * dim >= 128 * 128 or (itemsize > 2 and dim > 128) else 4,
        stages=stages,
    )


def scratch_size(rows: int, query_heads: int, dim: int, splits: int) -> int:
    """fp32 entries that the splits need to hand over: a sum [dim], a maximum and a total each."""
    return rows * query_heads * splits * (dim + 2)


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
