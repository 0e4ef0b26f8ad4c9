"""How far restoration is: what a callback gets, and a bar made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["decode", "completion"]


@dataclass(frozen=True)
class Progress:
    """After a pass that restored deferred tokens.

    Attributes:
        restored: Deferred tokens of the turn restored so far.
        total: Deferred tokens of the turn.
        phase: ``"decode"`` while the answer is generated, ``"completion"`` after it.
    """

    restored: int
    total: int
    phase: Phase


def progress_bar(**tqdm_options: Any) -> Callable[[Progress], None]:
    """A callback for ``RaincheckCache.on_progress`` that draws a tqdm bar for each turn.

    Args:
        **tqdm_options: As for ``tqdm``: ``desc``, ``file``, ``disable``, ...
    """
    from tqdm.auto import tqdm

    bar: Any = None

    def show(progress: Progress) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                **{"desc": "restoring", "unit": "token", **tqdm_options, "total": progress.total}
            )
        bar.set_postfix_str(progress.phase, refresh=False)
        bar.update(progress.restored - bar.n)
        if progress.restored == progress.total:
            bar.close()
            bar = None

    return show
