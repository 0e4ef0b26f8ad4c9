"""The only file that knows transformers' versions."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

SUPPORTED = (Version("5.24.0"), Version("5.25.0"))
"""The first release that works and the first that was not tested."""


def check_transformers() -> None:
    """Refuse a transformers release outside the tested range.

    Raises:
        ValueError: Names the release found, the range, and what to install.
    """
    found = Version(version("transformers"))
    first, untested = SUPPORTED
    if not first <= found < untested:
        raise ValueError(
            f"raincheck_hf supports transformers >= {first}, < {untested}; found {found}. "
            f"Install one with: pip install 'transformers>={first},<{untested}'"
        )
