"""The only file that knows transformers' versions."""

from __future__ import annotations

from functools import cache

import transformers
from packaging.version import Version

SUPPORTED = (Version("5.24.0"), Version("5.25.0"))
"""The first release that works and the first that was not tested."""


def check_transformers() -> None:
    """Refuse a transformers release outside the tested range.

    Raises:
        ValueError: Names the release found, the range, and what to install.
    """
    _check(installed())


def installed() -> str:
    """The release of transformers in this process; reading package metadata takes milliseconds."""
    return transformers.__version__


@cache
def _check(release: str) -> None:
    found = Version(release)
    first, untested = SUPPORTED
    if not first <= found < untested:
        raise ValueError(
            f"raincheck_hf supports transformers >= {first}, < {untested}; found {found}. "
            f"Install one with: pip install 'transformers>={first},<{untested}'"
        )
