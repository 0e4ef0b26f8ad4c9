"""Fixtures that every test may use."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Passes of small models are too short to share among threads; tests share the cores instead.
torch.set_num_threads(1)

ARCHITECTURES = ("qwen3_vl", "qwen3_5")


@pytest.fixture(scope="session", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    """Each supported architecture in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Tests draw the same numbers, alone or in company."""
    torch.manual_seed(0)
