"""Where a turn's rows live in the key/value buffers, and who sees whom. Plain Python.

The physical layout of one conversation is::

    0 ........ past | P | D slots | Y ...
                    ^start        ^answer_start

``past`` holds everything of earlier turns, complete and contiguous. D's slots are reserved between
P and Y, so that a finished turn is contiguous in the logical order P, D, Y (paper section A.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Group:
    """Consecutive rows of one pass that share their visibility.

    Attributes:
        rows: How many.
        slot: Physical slot of the first row; the others follow.
        sees: Half-open slot ranges that every row sees. Beside them, each row sees the rows of its
            own group up to itself.
        suffix: True for decode rows (the region Y), False for rows of P or D. Recurrent layers
            run suffix rows from the live state and the others from the prefix checkpoint.
    """

    rows: int
    slot: int
    sees: tuple[tuple[int, int], ...]
    suffix: bool


@dataclass(frozen=True)
class Regions:
    """The lengths of one turn, in tokens.

    Attributes:
        past: Rows of earlier turns.
        initial: Rows of P, the initial partition.
        deferred: Slots reserved for D; 0 for hard pruning.
        restored: Rows of D already restored.
        answer: Rows of Y, the consumed generated tokens.
    """

    past: int = 0
    initial: int = 0
    deferred: int = 0
    restored: int = 0
    answer: int = 0

    @property
    def pending(self) -> int:
        """Deferred tokens not yet restored."""
        return self.deferred - self.restored

    @property
    def prefix(self) -> int:
        """Visible slots before the reserved gap: past, P and the restored part of D."""
        return self.past + self.initial + self.restored

    @property
    def answer_start(self) -> int:
        """Slot of y_1."""
        return self.past + self.initial + self.deferred

    @property
    def end(self) -> int:
        """One past the last slot in use or reserved."""
        return self.answer_start + self.answer

    def next_turn(self, initial: int, deferred: int) -> Regions:
        """The regions of a new turn on top of this one.

        Raises:
            RuntimeError: Deferred tokens are still pending; the barrier was skipped.
        """
        if self.pending:
            raise RuntimeError(f"a new turn cannot start with {self.pending} tokens pending")
        return Regions(past=self.end, initial=initial, deferred=deferred)

    def without_answer(self) -> Regions:
        """The same turn rolled back to the end of its input, P and D complete."""
        return replace(self, answer=0)

    def with_restored(self, rows: int) -> Regions:
        """After a chunk of ``rows`` deferred tokens."""
        return replace(self, restored=self.restored + rows)

    def with_answer(self, rows: int) -> Regions:
        """After ``rows`` more generated tokens were consumed."""
        return replace(self, answer=self.answer + rows)

    def initial_group(self) -> Group:
        """P: sees the past, and itself causally."""
        return Group(self.initial, self.past, ((0, self.past),), suffix=False)

    def chunk_group(self, rows: int) -> Group:
        """The next ``rows`` of D: see past, P, the restored part of D; never Y."""
        return Group(rows, self.prefix, ((0, self.prefix),), suffix=False)

    def decode_group(self) -> Group:
        """The row consuming the next y: sees past, P, the restored part of D, and Y."""
        start = self.answer_start
        return Group(1, self.end, ((0, self.prefix), (start, self.end)), suffix=True)


def plain_causal(groups: tuple[Group, ...]) -> bool:
    """Whether these rows see just every slot before them, so that no mask is needed."""
    if len(groups) != 1:
        return False
    group = groups[0]
    seen = sum(stop - start for start, stop in group.sees)
    # One row that sees all before it, or a causal block from slot 0.
    return seen == group.slot and (group.rows == 1 or group.slot == 0)


def last_slot(groups: tuple[Group, ...]) -> int:
    """One past the highest slot that the groups read or write."""
    stops = [group.slot + group.rows for group in groups]
    stops += [stop for group in groups for _, stop in group.sees]
    return max(stops)
