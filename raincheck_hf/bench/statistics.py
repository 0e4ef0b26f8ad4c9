"""Recovery, and paired bootstrap intervals. Legend: N boards, R redraws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

REDRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval; not-a-number where it is undefined."""

    point: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready: undefined numbers become None."""
        return {
            name: None if np.isnan(value) else round(float(value), 6)
            for name, value in vars(self).items()
        }


def recovery(
    full: np.ndarray | float, hard: np.ndarray | float, way: np.ndarray | float
) -> np.ndarray:
    """Which share of the loss a way makes good: (way - hard) / (full - hard).

    Args:
        full: Accuracy of the full prefill.
        hard: Accuracy of hard pruning.
        way: Accuracy of the way in question.

    Returns:
        1 for no loss at all, 0 for hard pruning's; not a number where hard pruning loses nothing.
    """
    loss = np.asarray(full, dtype=float) - np.asarray(hard, dtype=float)
    gain = np.asarray(way, dtype=float) - np.asarray(hard, dtype=float)
    return np.divide(gain, loss, out=np.full(np.shape(loss), np.nan), where=loss > 1e-12)


def mean_interval(samples: np.ndarray, seed: int = 0) -> Interval:
    """The mean over boards.

    Args:
        samples: fp64 [N], one mean accuracy a board.
        seed: Fixes the redraws.
    """
    return _interval(float(samples.mean()), _redrawn(seed, samples)[0])


def recovery_interval(
    full: np.ndarray, hard: np.ndarray, way: np.ndarray, seed: int = 0
) -> Interval:
    """Recovery over boards; a redraw takes whole boards, with what each way made of them.

    Args:
        full: fp64 [N], one mean accuracy a board.
        hard: Likewise, on the same boards in the same order.
        way: Likewise.
        seed: Fixes the redraws.

    Raises:
        ValueError: The samples are not of one length.
    """
    if not len(full) == len(hard) == len(way):
        raise ValueError(
            "paired samples must be of one length; got "
            f"full {len(full)}, hard {len(hard)}, way {len(way)}"
        )
    point = float(recovery(full.mean(), hard.mean(), way.mean()))
    return _interval(point, recovery(*_redrawn(seed, full, hard, way)))


def _redrawn(seed: int, *samples: np.ndarray) -> list[np.ndarray]:
    """Means of samples [N] over boards drawn with replacement, fp64 [R] each."""
    count = len(samples[0])
    index = np.random.default_rng(seed).integers(count, size=(REDRAWS, count))
    return [sample[index].mean(axis=1) for sample in samples]


def _interval(point: float, redrawn: np.ndarray) -> Interval:
    defined = redrawn[~np.isnan(redrawn)]
    if np.isnan(point) or not len(defined):
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = np.percentile(defined, [2.5, 97.5])
    return Interval(point, float(low), float(high))
