"""Cosines, and what attention means where frames differ in size."""

from __future__ import annotations

import pytest
import torch
from selection_inputs import make_context

from raincheck_hf.selection import SelectionContext, select
from raincheck_hf.selection.similarity import cosines, lengths

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cosines_are_those_of_the_given_numbers(dtype: torch.dtype, device: str) -> None:
    rows = (7 * torch.randn(65, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    rows[3] = 0
    weight = torch.rand(65, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.normalize(rows.double(), dim=-1)
    expected = exact @ exact.T
    found = cosines(rows.to(device))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=2e-6)
    found = cosines(rows.to(device), weight.to(device))
    expected *= weight.double()[:, None] * weight.double()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=2e-6)
    assert lengths(rows)[3] > 0


def test_salience_is_one_where_attention_is_even() -> None:
    grid = [(1, 2, 2), (1, 4, 8), (2, 3, 3)]
    sizes = torch.tensor([4] * 4 + [32] * 32 + [9] * 18)
    context = SelectionContext(
        torch.randn(54, 8), grid, ["image", "image", "video"], attention=1 / sizes
    )
    torch.testing.assert_close(context.salience, torch.ones(54))


@pytest.mark.parametrize("name", ["saliency", "vispruner", "scope"])
def test_a_small_image_does_not_outrank_a_large_one(name: str) -> None:
    # The same relative attention in both: the small image keeps about its share of the budget.
    generator = torch.Generator().manual_seed(0)
    raw = [torch.randn(n, generator=generator).exp() for n in (16, 256)]
    context = SelectionContext(
        torch.randn(272, 48, generator=generator),
        [(1, 4, 4), (1, 16, 16)],
        features=torch.randn(272, 20, generator=generator),
        attention=torch.cat([part / part.sum() for part in raw]),
    )
    small = int(select(context, name, 0.25).mask[:16].sum())
    assert 1 <= small <= 9


@pytest.mark.parametrize("name", ["mmtok", "cdpruner", "divprune", "scope"])
def test_nan_is_noticed(name: str) -> None:
    context = make_context("image")
    embeds, features = context.embeds, context.features
    embeds[4, 0] = features[4, 0] = torch.nan
    broken = SelectionContext(
        embeds, context.grid, query=context.query, features=features, attention=context.attention
    )
    with pytest.raises(ValueError, match="NaN"):
        select(broken, name, 0.3)
