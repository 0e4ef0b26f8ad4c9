"""What the commands share: the parser, its kinds of arguments, and the way to refuse them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

MODELS = ("qwen3_vl", "qwen3_5")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are short."""

    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2; `--help` has the rest."""
        self.exit(2, f"{self.prog}: error: {message}\n")


Commands = argparse._SubParsersAction  # the type of a group of commands has no public name


class BadArguments(Exception):
    """Arguments that parse, and cannot be used."""


@contextmanager
def refusing() -> Iterator[None]:
    """Say in one line what a `ValueError` of the work says: around what checks arguments."""
    try:
        yield
    except ValueError as error:
        raise BadArguments(str(error)) from error


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    return _at_least(0, text)


def _at_least(low: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"must be a whole number, {low} or more; got {text!r}")
    return value
