"""The arrows between files go one way, and importing the package changes nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import raincheck_hf

ROOT = Path(raincheck_hf.__file__).parent

# What a room may import from the package; anything else is an arrow in the wrong direction.
ALLOWED: dict[str, set[str]] = {
    "kernels": {"kernels"},
    "arguments.py": set(),
    "config.py": {"selection"},
    "schedule.py": {"config"},
    "regions.py": set(),
    "report.py": set(),
    "binding.py": set(),
    "turnstile.py": set(),
    "aside.py": set(),
    "_compat.py": set(),
    "wrapped.py": set(),
    "inputs.py": set(),
    "buffers.py": set(),
    "recurrent.py": {"kernels"},
    "selection": {"selection", "kernels"},
    "models": {"models", "buffers", "kernels"},
    "executor": {"executor", "models", "buffers", "recurrent", "regions", "kernels"},
    "bench/dialogues": {"bench", "config", "report", "selection", "session"},
    "bench/dialogues/converters": {"bench"},
    "bench/dialogues/endpoint.py": set(),
    "bench/dialogues/format.py": set(),
    "conversation.py": {"buffers", "inputs", "recurrent", "regions"},
    "harness": {"harness", "cache", "config", "generation", "report", "tiny"},
}


def imports(path: Path) -> set[str]:
    """Top-level rooms of the package that a file imports at run time."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raincheck_hf"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_arrows_go_one_way(room: str) -> None:
    place = ROOT / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    assert files
    for file in files:
        wrong = imports(file) - ALLOWED[room]
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_kernels_import_torch_and_triton_only() -> None:
    for file in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                top = name.split(".")[0]
                assert top in {"torch", "triton", "raincheck_hf"} | set(sys.stdlib_module_names)


def test_only_one_file_knows_versions() -> None:
    for file in ROOT.rglob("*.py"):
        if file.name not in ("_compat.py", "cli.py") and "bench" not in file.parts:
            assert "packaging.version" not in file.read_text(), file


def test_importing_changes_nothing_and_builds_nothing() -> None:
    program = """
import torch, transformers
from transformers import Qwen3VLForConditionalGeneration as A, Qwen3_5ForConditionalGeneration as B
from transformers.generation import GenerationMixin as G
def members():
    return {(c, n): v for c in (*A.__mro__, *B.__mro__, G) for n, v in vars(c).items()
            if c.__module__.startswith(("transformers", "torch"))}
import threading
before, threads = members(), threading.active_count()
import raincheck_hf
after = members()
assert {k: id(v) for k, v in before.items()} == {k: id(v) for k, v in after.items()}
assert threading.active_count() == threads and not torch.cuda.is_initialized()
import sys
assert "gradio" not in sys.modules and "matplotlib" not in sys.modules
print("inert")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "inert", done.stderr
