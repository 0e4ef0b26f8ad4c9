"""Each method against its definition, by brute force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import selection_brute_force as brute
import torch
from selection_inputs import LAYOUTS, make_context

from raincheck_hf.selection import SelectionContext, keep_count, list_selectors, select
from raincheck_hf.selection.cdpruner import conditioned, relevance
from raincheck_hf.selection.mmtok import coverage_matrix
from raincheck_hf.selection.similarity import cosines
from raincheck_hf.selection.video import apportion, spread

RETENTIONS = [0.05, 0.3, 0.62]


def salience(context: SelectionContext) -> torch.Tensor:
    """Attention over what an even spread within the frame would give."""
    frames = context.frame.tolist()
    return torch.tensor(
        [
            float(value) * frames.count(frame)
            for value, frame in zip(context.attention, frames, strict=True)
        ]
    )


def uniform(context: SelectionContext, budget: int) -> list[int]:
    return [int((i + 0.5) * context.n / budget) for i in range(budget)]


# Picks of one group in the order taken, for methods that are a greedy walk, else as a set.
DEFINITIONS: dict[str, Callable[[SelectionContext, int], list[int]]] = {
    "mmtok": lambda c, k: brute.mmtok(c.embeds, c.features, c.query, k),
    "cdpruner": lambda c, k: brute.cdpruner(c.embeds, c.query, k),
    "divprune": lambda c, k: brute.divprune(c.embeds, k),
    "scope": lambda c, k: brute.scope(c.embeds, salience(c), k),
    "saliency": lambda c, k: brute.top(salience(c).tolist(), k),
    "vispruner": lambda c, k: brute.vispruner(c.features, salience(c), k),
    "evs": lambda c, k: brute.evs(c.embeds, list(c.grid), list(c.kind), k),
    "vidcom2": lambda c, k: brute.vidcom2(c.embeds, list(c.grid), list(c.kind), k),
    "uniform": uniform,
}
ORDERED = {"mmtok", "cdpruner", "divprune", "scope", "saliency"}


def picked(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_prompt_scope_against_brute_force(name: str, layout: str, retention: float) -> None:
    context = make_context(layout)
    selection = select(context, name, retention)
    budget = keep_count(retention, context.n)
    expected = DEFINITIONS[name](context, budget)
    assert picked(selection.mask) == sorted(expected)
    if name in ORDERED:
        taken = selection.scores.argsort(descending=True, stable=True)[:budget]
        assert taken.tolist() == expected


@pytest.mark.parametrize("name", DEFINITIONS)
def test_item_scope_is_each_item_alone(name: str) -> None:
    context = make_context("mixed")
    found = select(context, name, 0.4, "item").mask
    for (start, stop), grid, kind in zip(
        context.item_spans, context.grid, context.kind, strict=True
    ):
        alone = SelectionContext(
            context.embeds[start:stop],
            [grid],
            [kind],
            query=context.query,
            features=context.features[start:stop],
            attention=context.attention[start:stop],
        )
        expected = DEFINITIONS[name](alone, keep_count(0.4, stop - start))
        assert picked(found[start:stop]) == sorted(expected)


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - {"evs", "vidcom2"}))
def test_frame_scope_is_each_frame_alone(name: str) -> None:
    context = make_context("mixed")
    found = select(context, name, 0.4, "frame").mask
    for start, stop in context.frame_spans:
        alone = SelectionContext(
            context.embeds[start:stop],
            [(1, 1, stop - start)],
            query=context.query,
            features=context.features[start:stop],
            attention=context.attention[start:stop],
        )
        expected = DEFINITIONS[name](alone, keep_count(0.4, stop - start))
        assert picked(found[start:stop]) == sorted(expected)


@pytest.mark.parametrize("name", ["evs", "vidcom2"])
def test_frame_scope_of_video_methods_looks_across_frames(name: str) -> None:
    context = make_context("mixed")
    found = select(context, name, 0.4, "frame").mask
    x = brute.unit(context.embeds)
    for (first, last), (t, h, w), kind in zip(
        context.item_spans, context.grid, context.kind, strict=True
    ):
        size = h * w
        count = keep_count(0.4, size)
        centre = x[first:last].mean(0) / x[first:last].mean(0).norm()
        for frame in range(t):
            rows = range(first + frame * size, first + (frame + 1) * size)
            middle = x[rows].mean(0) / x[rows].mean(0).norm()
            if kind == "image" or (name == "evs" and frame == 0):
                expected = brute.even(size, count)
            elif name == "evs":
                expected = brute.top([1 - float(x[i] @ x[i - size]) for i in rows], count)
            else:
                expected = brute.top([-float(x[i] @ (centre + middle)) for i in rows], count)
            assert picked(found[rows.start : rows.stop]) == sorted(expected)


@pytest.mark.parametrize("name", ["mmtok", "cdpruner"])
def test_without_a_query(name: str) -> None:
    context = make_context("image", query=0)
    expected = {
        "mmtok": lambda: brute.mmtok(context.embeds, context.features, context.query, 11),
        "cdpruner": lambda: brute.cdpruner(context.embeds, context.query, 11),
    }[name]()
    assert picked(select(context, name, 0.3).mask) == sorted(expected)


@pytest.mark.parametrize("name", ["mmtok", "cdpruner"])
def test_query_aware_methods_follow_the_query(name: str) -> None:
    context = make_context("image")
    other = SelectionContext(
        context.embeds, context.grid, query=-context.query, features=context.features
    )
    assert not torch.equal(select(context, name, 0.3).mask, select(other, name, 0.3).mask)


@pytest.mark.parametrize("name", sorted(set(list_selectors()) - {"mmtok", "cdpruner"}))
def test_the_others_do_not(name: str) -> None:
    without = make_context("mixed", query=0)
    assert torch.equal(
        select(make_context("mixed"), name, 0.3).mask, select(without, name, 0.3).mask
    )


@pytest.mark.parametrize("query", [0, 5])
def test_mmtok_covers_text_and_picture_in_the_published_proportion(query: int) -> None:
    context = make_context("image", query=query)
    expected = brute.mmtok_rows(context.embeds, context.features, context.query)
    found = coverage_matrix(context)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-9
    )


def test_cdpruner_goes_on_by_relevance_when_the_rank_is_used_up() -> None:
    # 35 tokens in 4 dimensions: 4 picks by determinant, the rest by relevance.
    torch.manual_seed(0)
    context = SelectionContext(torch.randn(35, 4), [(1, 5, 7)], query=torch.randn(3, 4))
    found = select(context, "cdpruner", 0.4)
    expected = brute.cdpruner(context.embeds, context.query, 14)
    assert picked(found.mask) == sorted(expected)
    by_relevance = brute.top(relevance(context).tolist(), 35)
    assert expected[4:] == [j for j in by_relevance if j not in expected[:4]][:10]


def test_relevance_is_in_range_and_not_negated() -> None:
    context = make_context("image")
    relevant = relevance(context)
    assert 0 < relevant.min() <= relevant.max() == 1
    cosine = context.unit_embeds @ context.query.mean(0)
    assert relevant.argmax() == cosine.argmax()
    assert torch.equal(relevance(make_context("image", query=0)), torch.ones(35))
    torch.testing.assert_close(
        conditioned(cosines(context.embeds), relevant).double(),
        brute.dpp_kernel(context.embeds, context.query),
        rtol=1e-4,
        atol=1e-5,
    )


def test_evs_keeps_the_first_frame_and_then_what_changed() -> None:
    frame = torch.randn(12, 48, generator=torch.Generator().manual_seed(3))
    video = frame.repeat(3, 1)
    video[12 + 5], video[24 + 7] = -frame[5], torch.ones(48)
    context = SelectionContext(video, [(3, 3, 4)], ["video"])
    mask = select(context, "evs", 15 / 36).mask
    # The change at 17 is undone at 29: both are changes, and 31 is the third.
    assert picked(mask) == [*range(12), 17, 29, 31]


def test_vidcom2_gives_an_unusual_frame_more() -> None:
    generator = torch.Generator().manual_seed(3)
    video = torch.ones(4, 12, 48) + 0.3 * torch.randn(4, 12, 48, generator=generator)
    video[2] = torch.randn(12, 48, generator=generator)
    context = SelectionContext(video.flatten(0, 1), [(4, 3, 4)], ["video"])
    counts = select(context, "vidcom2", 0.25).mask.view(4, 12).sum(1).tolist()
    assert counts[2] == max(counts) > 3
    assert sum(counts) == 12


@pytest.mark.parametrize("name", ["evs", "vidcom2"])
def test_video_methods_leave_images_their_share(name: str) -> None:
    context = make_context("mixed")
    mask = select(context, name, 0.4).mask
    for (start, stop), kind in zip(context.item_spans, context.kind, strict=True):
        if kind == "image":
            assert abs(int(mask[start:stop].sum()) - 0.4 * (stop - start)) < 1


def test_video_methods_say_so_when_there_is_no_video(caplog: pytest.LogCaptureFixture) -> None:
    from raincheck_hf.selection import video

    video._log_no_video.cache_clear()
    for _ in range(2):
        select(make_context("images"), "evs", 0.4)
    assert [record.message for record in caplog.records if "is for video" in record.message] == [
        "selector 'evs' is for video; an input with images only gets evenly spread tokens"
    ]


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
def test_spread_leaves_no_large_gap(n: int) -> None:
    order = spread(n, torch.device("cpu")).argsort(descending=True)
    for count in {1, max(1, n // 7), max(1, n // 3), n}:
        places = [-1, *sorted(order[:count].tolist()), n]
        widest = max(b - a for a, b in zip(places, places[1:], strict=False))
        assert widest <= 3 * n / count + 1


def test_apportion() -> None:
    assert apportion(10, [1, 1, 1], [10, 10, 10]) == [4, 3, 3]
    assert apportion(10, [8, 1, 1], [5, 10, 10]) == [5, 3, 2]
    assert apportion(0, [1, 2], [3, 3]) == [0, 0]
    assert apportion(6, [1, 5], [3, 3]) == [3, 3]
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        caps = torch.randint(1, 9, (5,), generator=generator).tolist()
        weights = (torch.rand(5, generator=generator) + 0.01).tolist()
        total = int(torch.randint(0, sum(caps) + 1, (1,), generator=generator))
        found = apportion(total, weights, caps)
        assert sum(found) == total
        assert all(0 <= share <= cap for share, cap in zip(found, caps, strict=True))
        assert found == brute.shares(total, weights, caps)


def test_every_method_is_covered_here() -> None:
    assert set(list_selectors()) >= set(DEFINITIONS) | {"random"}
    assert set(LAYOUTS) == {"image", "images", "video", "mixed"}
