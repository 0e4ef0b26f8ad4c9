"""What `select` does for every method: counts, scopes, ties, order, and bad returns."""

from __future__ import annotations

import gc
import math
import weakref
from fractions import Fraction

import pytest
import torch
from selection_inputs import make_context
from torch import Tensor

from raincheck_hf.selection import (
    SelectionContext,
    get_selector,
    keep_count,
    list_selectors,
    register_selector,
    registry,
    select,
)

NAMES = list_selectors()


def group_spans(context: SelectionContext, scope: str) -> list[tuple[int, int]]:
    return {
        "prompt": [(0, context.n)],
        "item": context.item_spans,
        "frame": context.frame_spans,
    }[scope]


def test_the_built_in_methods() -> None:
    assert set(NAMES) >= {
        "cdpruner", "divprune", "evs", "mmtok", "random", "saliency", "scope", "uniform",
        "vidcom2", "vispruner",
    }  # fmt: skip


@pytest.mark.parametrize("scope", ["prompt", "item", "frame"])
@pytest.mark.parametrize("name", NAMES)
def test_count_dtype_and_determinism(name: str, layout: str, scope: str) -> None:
    for retention in (0.01, 0.1, 0.3, 0.5, 0.99, 1):
        context = make_context(layout)
        found = select(context, name, retention, scope)
        assert found.mask.dtype == torch.bool
        assert found.mask.shape == (context.n,)
        assert found.scores.dtype == torch.float32
        assert found.scores.shape == (context.n,)
        for start, stop in group_spans(context, scope):
            kept, mask = int(found.mask[start:stop].sum()), found.mask[start:stop]
            assert kept == max(1, math.ceil(Fraction(str(retention)) * (stop - start)))
            scores = found.scores[start:stop]
            if kept < stop - start:
                assert scores[mask].min() >= scores[~mask].max()
        for again in (
            select(context, name, retention, scope),
            select(make_context(layout), name, retention, scope),
        ):
            assert torch.equal(again.mask, found.mask)
            assert torch.equal(again.scores, found.scores)


def test_rounding_is_that_of_paper() -> None:
    assert keep_count(0.3, 10) == 3
    assert keep_count(0.1, 30) == 3
    assert keep_count(0.07, 100) == 7
    assert keep_count(0.301, 10) == 4
    assert keep_count(1e-9, 10) == 1
    for percent in range(1, 101):
        for n in (*range(1, 200), 1000, 4096, 16384):
            assert keep_count(percent / 100, n) == max(1, -(-percent * n // 100))


def test_ties_go_by_index_and_infinities_are_scores() -> None:
    context = make_context("image")
    assert select(context, lambda c: torch.zeros(c.n), 0.2).mask.nonzero().flatten().tolist() == [
        0, 1, 2, 3, 4, 5, 6,
    ]  # fmt: skip

    def infinite(group: SelectionContext) -> Tensor:
        scores = torch.zeros(group.n)
        scores[30], scores[:5] = torch.inf, -torch.inf
        return scores

    found = select(context, infinite, 3 / 35)
    assert found.mask.nonzero().flatten().tolist() == [5, 6, 30]
    assert found.scores[30] == torch.inf


def test_tokens_are_in_source_order_over_items() -> None:
    context = make_context("mixed")
    assert context.item.tolist() == [0] * 16 + [1] * 36 + [2] * 10 + [3] * 18
    sizes = [16, 12, 12, 12, 10, 9, 9]
    assert context.frame.tolist() == [f for f, size in enumerate(sizes) for _ in range(size)]
    seen: list[Tensor] = []

    def record(group: SelectionContext) -> Tensor:
        seen.append(group.embeds)
        return torch.zeros(group.n)

    for scope, groups in (("prompt", 1), ("item", 4), ("frame", 7)):
        seen.clear()
        select(context, record, 0.5, scope)
        assert len(seen) == groups
        assert torch.equal(torch.cat(seen), context.embeds)


def test_a_group_looks_like_an_input_of_its_own() -> None:
    context = make_context("mixed")
    groups: list[SelectionContext] = []

    def record(group: SelectionContext) -> Tensor:
        groups.append(group)
        assert group.item.max() == len(group.grid) - 1
        assert len(group) == group.n == len(group.embeds) == len(group.features)
        assert len(group.attention) == len(group.unit_embeds) == len(group.item) == group.n
        assert torch.equal(group.query, context.query)
        assert group.whole is context
        assert torch.equal(context.features[slice(*group.span)], group.features)
        return torch.zeros(group.n)

    select(context, record, 0.3, "item")
    assert [g.kind for g in groups] == [("image",), ("video",), ("image",), ("video",)]
    assert [g.grid for g in groups] == [(grid,) for grid in context.grid]
    assert [g.budget for g in groups] == [5, 11, 3, 6]
    assert [g.whole_item(0) for g in groups] == context.item_spans
    groups.clear()
    select(context, record, 0.3, "frame")
    assert [g.span for g in groups] == context.frame_spans
    assert [g.whole_item(0) for g in groups][1:4] == [context.item_spans[1]] * 3
    assert {g.grid[0][0] for g in groups} == {1}


def test_a_mask_is_the_selection_itself() -> None:
    context = make_context("mixed")
    wanted = torch.arange(context.n) % 3 == 0
    found = select(context, lambda c: wanted, 0.9)
    assert torch.equal(found.mask, wanted)
    assert torch.equal(found.scores, wanted.float())
    by_item = select(context, lambda c: torch.arange(c.n) < 2, 0.9, "item").mask
    assert [int(by_item[a:b].sum()) for a, b in context.item_spans] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda c: torch.zeros(c.n + 1), ValueError, r"shape \[80\].*got \[81\]"),
        (lambda c: torch.zeros(c.n, 1), ValueError, r"shape \[80\].*got \[80, 1\]"),
        (lambda c: torch.tensor(1.0), ValueError, r"got \[\]"),
        (lambda c: torch.zeros(c.n).index_fill(0, torch.tensor([3]), torch.nan), ValueError, "NaN"),
        (lambda c: torch.zeros(c.n, dtype=torch.bool), ValueError, "keeps none"),
        (lambda c: torch.zeros(c.n, dtype=torch.long), TypeError, "torch.int64"),
        (lambda c: torch.zeros(c.n, dtype=torch.complex64), TypeError, "torch.complex64"),
        (lambda c: [0.0] * c.n, TypeError, "got list"),
        (lambda c: None, TypeError, "got NoneType"),
    ],
)
def test_bad_returns_name_the_selector(bad, error: type[Exception], message: str) -> None:
    bad.__qualname__ = "my_selector"
    with pytest.raises(error, match=f"my_selector.*{message}"):
        select(make_context("mixed"), bad, 0.3)


def test_what_a_selector_raises_is_the_cause() -> None:
    def fails(group: SelectionContext) -> Tensor:
        return torch.zeros(1)[group.n]

    with pytest.raises(ValueError, match="fails.*raised IndexError") as caught:
        select(make_context("image"), fails, 0.3)
    assert isinstance(caught.value.__cause__, IndexError)

    def exhausted(group: SelectionContext) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        select(make_context("image"), exhausted, 0.3)


@pytest.mark.parametrize("name", ["saliency", "mmtok"])
def test_a_missing_source_is_named(name: str) -> None:
    context = SelectionContext(torch.randn(6, 4), [(1, 2, 3)])
    with pytest.raises(ValueError, match=f"{name}.*carries no (attention|features)"):
        select(context, name, 0.3)


@pytest.mark.parametrize("retention", [0, -0.1, 1.2, math.nan, math.inf])
def test_retention_out_of_range(retention: float) -> None:
    with pytest.raises(ValueError, match=r"retention must be in \(0, 1\]"):
        select(make_context("image"), "uniform", retention)


def test_unknown_scope_and_selector() -> None:
    with pytest.raises(ValueError, match="prompt, item, frame.*'image'"):
        select(make_context("image"), "uniform", 0.3, "image")
    with pytest.raises(ValueError, match="unknown selector 'mmtokk'.*cdpruner.*vispruner"):
        select(make_context("image"), "mmtokk", 0.3)
    with pytest.raises(TypeError, match="got int"):
        get_selector(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("embeds", "grid", "kind"),
    [
        (torch.zeros(6, 4), [(1, 2, 2)], None),
        (torch.zeros(4), [(1, 2, 2)], None),
        (torch.zeros(4, 4), [(1, 2, 2)], ["audio"]),
        (torch.zeros(4, 4), [(1, 2, 2)], ["image", "image"]),
    ],
)
def test_a_context_that_does_not_add_up(embeds: Tensor, grid: list, kind: list | None) -> None:
    with pytest.raises(ValueError, match="must"):
        SelectionContext(embeds, grid, kind)
    context = SelectionContext(torch.zeros(4, 4), [(1, 2, 2)], attention=torch.zeros(3))
    with pytest.raises(ValueError, match="attention must have 4 rows"):
        _ = context.attention


def test_no_tokens_at_all_and_retention_one() -> None:
    def never(group: SelectionContext) -> Tensor:
        raise AssertionError

    nothing = SelectionContext(torch.zeros(0, 4), [])
    assert select(nothing, never, 0.3).mask.shape == (0,)
    assert select(make_context("image"), never, 1).mask.all()


def test_a_selector_cannot_change_the_embeddings_and_gets_no_gradients() -> None:
    embeds = torch.randn(35, 48, requires_grad=True)
    before = embeds.detach().clone()

    def vandal(group: SelectionContext) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not group.embeds.requires_grad
        group.embeds.zero_()
        return group.embeds.sum(1)

    context = make_context("image", embeds=embeds)
    found = select(context, vandal, 0.3, "frame")
    assert torch.equal(embeds, before)
    assert not found.scores.requires_grad


def test_lazy_sources_run_once_and_only_when_asked() -> None:
    calls: list[str] = []

    def attention() -> Tensor:
        calls.append("attention")
        return torch.rand(80)

    def features() -> Tensor:
        calls.append("features")
        return torch.rand(80, 6)

    context = make_context("mixed", attention=attention, features=features)
    select(context, "divprune", 0.3)
    assert calls == []
    select(context, "saliency", 0.3, "frame")
    select(context, "vispruner", 0.3, "item")
    assert calls == ["attention", "features"]


def test_random_follows_the_seed_and_differs_between_frames() -> None:
    def found(seed: int) -> Tensor:
        grid = [(4, 6, 6)]
        context = SelectionContext(torch.zeros(144, 4), grid, ["video"], seed=seed)
        return select(context, "random", 0.3, "frame").mask

    assert torch.equal(found(1), found(1))
    assert not torch.equal(found(1), found(2))
    frames = found(1).view(4, 36)
    assert len({tuple(frame.tolist()) for frame in frames}) == 4


def test_half_precision_is_selected_as_its_fp32_values_are() -> None:
    for name in NAMES:
        half = make_context("mixed", embeds=make_context("mixed").embeds.bfloat16())
        single = make_context("mixed", embeds=half.embeds.float())
        assert torch.equal(select(half, name, 0.3).mask, select(single, name, 0.3).mask)


def test_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SELECTORS", dict(registry._SELECTORS))

    @register_selector("mine")
    def first(group: SelectionContext) -> Tensor:
        return torch.zeros(group.n)

    @register_selector("mine")
    def second(group: SelectionContext) -> Tensor:
        return torch.arange(group.n).float()

    assert get_selector("mine") is second
    assert get_selector(first) is first
    assert "mine" in list_selectors()
    assert select(make_context("image"), "mine", 1 / 35).mask.nonzero().item() == 34
    with pytest.raises(ValueError, match="built in"):
        register_selector("mmtok")(first)
    with pytest.raises(ValueError, match="built in"):
        register_selector("")(first)


def test_a_context_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        context = make_context("mixed")
        embeds = weakref.ref(context._embeds)
        for name in NAMES:
            select(context, name, 0.3, "frame")
        del context
        assert embeds() is None
    finally:
        gc.enable()
