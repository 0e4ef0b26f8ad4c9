"""Fixtures of the selector tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from selection_inputs import LAYOUTS, build
from torch import nn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["qwen3_vl", "qwen3_5"], scope="session")
def model(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param)


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return request.param
