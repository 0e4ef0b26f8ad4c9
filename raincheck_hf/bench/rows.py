"""Results as JSON Lines: appended as they come, never rewritten, so that a run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

KEY = (
    "task", "model", "weights", "dtype", "device", "size", "turns", "seed", "board",
    "retention", "chunk_size", "guard_tokens", "selector", "way",
)  # fmt: skip
"""Fields that say what was measured; two rows that agree in them are the same measurement."""


def key_of(row: Mapping[str, Any], fields: Sequence[str] = KEY) -> str:
    """A row's identity.

    Raises:
        KeyError: It lacks one of the fields.
    """
    return json.dumps([row[field] for field in fields])


class RowFile:
    """A file of rows.

    Args:
        path: The file; it and its folder may be missing.
        fields: Those that tell one of its rows from another.

    Attributes:
        unreadable: Lines that are no rows, such as one cut short when a run was stopped.
    """

    def __init__(self, path: Path, fields: Sequence[str] = KEY) -> None:
        self.path = path
        self.fields = tuple(fields)
        self.unreadable = 0
        self._rows: dict[str, Row] = {}
        self._whole_lines = True
        if path.exists():
            # A run that is stopped may leave half a character behind.
            text = path.read_text(encoding="utf-8", errors="replace")
            self._whole_lines = not text or text.endswith("\n")
            # Not splitlines(): an answer may hold U+2028 and the like as they are.
            for line in filter(str.strip, text.split("\n")):
                self._take(line)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def rows(self, keys: Iterable[str]) -> list[Row]:
        """The rows of these keys, in their order, as far as they are there."""
        return [self._rows[key] for key in keys if key in self._rows]

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows that are new, at the end."""
        fresh = {key_of(row, self.fields): row for row in rows}
        fresh = {key: row for key, row in fresh.items() if key not in self._rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            if not self._whole_lines:
                file.write("\n")
                self._whole_lines = True
            for row in fresh.values():
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._rows |= fresh

    def _take(self, line: str) -> None:
        try:
            row = json.loads(line)
            self._rows.setdefault(key_of(row, self.fields), row)
        except (ValueError, KeyError, TypeError):
            self.unreadable += 1
