"""The first sheet of an Excel workbook as texts, by the standard library alone."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_REF = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"


def read_sheet(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows under the first one, by the heads that stand there.

    Args:
        path: An .xlsx file.

    Returns:
        For each row that is not empty, its number as Excel shows it, and the texts of its cells
        under a head; empty cells are left out.

    Raises:
        ValueError: It is no workbook, or holds no rows.
    """
    try:
        with zipfile.ZipFile(path) as book:
            shared = _shared(book)
            sheet = ElementTree.fromstring(book.read(_first_sheet(book)))
            rows = [(number, dict(_cells(row, shared))) for number, row in _rows(sheet)]
    except (OSError, KeyError, ValueError, IndexError, SyntaxError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as an Excel workbook: {error!r}") from error
    rows = [(number, cells) for number, cells in rows if cells]
    if not rows:
        raise ValueError(f"{path}: the first sheet is empty")
    heads = rows[0][1]
    named = [
        (number, {heads[column]: text for column, text in cells.items() if column in heads})
        for number, cells in rows[1:]
    ]
    return [(number, cells) for number, cells in named if cells]


def _first_sheet(book: zipfile.ZipFile) -> str:
    """Workbooks name their sheets in order, and say elsewhere in which file each one is."""
    workbook = ElementTree.fromstring(book.read("xl/workbook.xml"))
    sheets = workbook.find(f"{_MAIN}sheets")
    name = "" if sheets is None else sheets[0].get(_REF)
    for link in ElementTree.fromstring(book.read("xl/_rels/workbook.xml.rels")):
        if link.get("Id") == name:
            target = link.get("Target", "")
            return target[1:] if target.startswith("/") else f"xl/{target}"
    raise ValueError("the workbook names no sheet")


def _shared(book: zipfile.ZipFile) -> list[str]:
    if "xl/sharedStrings.xml" not in book.namelist():
        return []
    root = ElementTree.fromstring(book.read("xl/sharedStrings.xml"))
    return [_text(item) for item in root.iter(f"{_MAIN}si")]


def _rows(sheet: Element) -> Iterator[tuple[int, Element]]:
    for at, row in enumerate(sheet.iter(f"{_MAIN}row"), 1):
        yield int(row.get("r", at)), row


def _cells(row: Element, shared: list[str]) -> Iterator[tuple[str, str]]:
    """Column letters and texts."""
    for cell in row.iter(f"{_MAIN}c"):
        kind, value = cell.get("t"), cell.find(f"{_MAIN}v")
        if kind == "inlineStr":
            text = _text(cell)
        elif value is None or value.text is None:
            continue
        else:
            text = shared[int(value.text)] if kind == "s" else value.text
        if text.strip():
            yield re.sub(r"\d", "", cell.get("r", "")), text.strip()


def _text(item: Element) -> str:
    """All runs of a rich text; reading aids for Japanese are none of them."""
    aids = {id(text) for aid in item.iter(f"{_MAIN}rPh") for text in aid.iter(f"{_MAIN}t")}
    return "".join(text.text or "" for text in item.iter(f"{_MAIN}t") if id(text) not in aids)
