"""Every notebook runs from top to bottom, quickly, and is stored without outputs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat reads the notebooks")
nbclient = pytest.importorskip("nbclient", reason="nbclient runs the notebooks")
pytest.importorskip("ipykernel", reason="ipykernel is the notebooks' kernel")

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Thirty on two quiet cores; the rest is room for company.
MOST_SECONDS = 120


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs_in_short_cells(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert len(cell.source.splitlines()) <= 16, f"a long cell:\n{cell.source}"
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, "outputs are not stored"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    start = time.monotonic()
    nbclient.NotebookClient(
        notebook,
        timeout=MOST_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()  # a cell that raises fails the test with its traceback
    assert time.monotonic() - start < MOST_SECONDS
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") == "stdout"
    )
    assert printed.strip(), "a notebook that shows nothing teaches nothing"
