"""Launching a kernel again with arguments of the same kinds, without looking at them again.

Triton inspects every argument of every launch to find the compiled variant, which takes longer than
a small kernel runs. A prefill launches the same few kernels for each layer: looked up once is
enough.
"""

from __future__ import annotations

from typing import Any


class Repeated:
    """One kernel on one grid.

    All calls must pass tensors of the same dtypes and alignment, and the same integers wherever
    the first call's were 1 or multiples of 16 and the later ones' are not.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], options: dict[str, Any]) -> None:
        """Bind what does not change.

        Args:
            kernel: A jitted function whose constants come last.
            grid: One to three numbers of programs.
            options: Its constants and launch options.
        """
        self._kernel, self._options = kernel, options
        self._grid = (*grid, 1, 1)[:3]
        names = getattr(kernel, "arg_names", ())
        self._constants = tuple(options[name] for name in names if name in options)
        self._compiled: Any = None

    def __call__(self, *args: Any) -> None:
        """Launch with the arguments that are not constants, in the order of the signature."""
        if self._compiled is None:
            # None in the interpreter, which compiles nothing.
            self._compiled = self._kernel[self._grid](*args, **self._options)
        else:
            self._compiled[self._grid](*args, *self._constants)
