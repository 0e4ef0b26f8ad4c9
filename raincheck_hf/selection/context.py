"""What a selector sees of the multimodal tokens of one input.

Shapes: n multimodal tokens of the new input in source order, d the language model's width, d' the
vision tower's width, m query tokens. Grids are in merged units: one cell of (t, h, w) is one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

Grid = tuple[int, int, int]
Span = tuple[int, int]
TensorOrThunk = Tensor | Callable[[], Tensor]


def _spans(sizes: Sequence[int]) -> list[Span]:
    """Half-open (start, stop) of consecutive runs of the given sizes."""
    spans, start = [], 0
    for size in sizes:
        spans.append((start, start + size))
        start += size
    return spans


class SelectionContext:
    """The multimodal tokens of an input, or of one scope group of it.

    A selector is called once for each scope group, and a group looks like an input of its own:
    `n`, `grid`, `kind`, `item` and `frame` describe the group alone. `whole` and `span` lead back
    to the input that it was cut from, for methods that look across groups.

    Attributes:
        grid: (t, h, w) of each item, merged units; an image has t = 1.
        kind: `"image"` or `"video"`, one an item.
        budget: tokens to keep here; n where nothing was asked.
        seed: from the config, for methods that draw; see `generator`.
        span: (start, stop) of this group in `whole`.
    """

    def __init__(
        self,
        embeds: Tensor,
        grid: Sequence[Sequence[int]],
        kind: Sequence[str] | None = None,
        *,
        query: Tensor | None = None,
        features: TensorOrThunk | None = None,
        attention: TensorOrThunk | None = None,
        seed: int = 0,
    ) -> None:
        """Describe a whole input.

        Args:
            embeds: [n, d], after the merger, items in source order.
            grid: (t, h, w) per item in merged units; the products add up to n.
            kind: `"image"` or `"video"` per item; all images if left out.
            query: [m, d] embeddings of the current turn's text; None counts as m = 0.
            features: [n, d'] before the merger, or a function that makes them when asked.
            attention: [n] attention received in the vision tower, or a function likewise.
            seed: for methods that draw.

        Raises:
            ValueError: the grids do not describe n tokens, or a kind is missing or unknown.
        """
        self.grid: tuple[Grid, ...] = tuple((int(t), int(h), int(w)) for t, h, w in grid)
        self.kind = tuple(kind) if kind is not None else ("image",) * len(self.grid)
        if len(self.kind) != len(self.grid) or not set(self.kind) <= {"image", "video"}:
            raise ValueError(
                f"kind must name 'image' or 'video' for each of {len(self.grid)} grids, "
                f"got {self.kind}"
            )
        n = sum(t * h * w for t, h, w in self.grid)
        if embeds.ndim != 2 or embeds.shape[0] != n:
            raise ValueError(
                f"embeds must be [{n}, d], as the grids (merged units) count {n} tokens, "
                f"got {list(embeds.shape)}"
            )
        self.budget = n
        self.seed = seed
        self.span: Span = (0, n)
        self._parent: SelectionContext | None = None
        self._embeds = embeds.detach()
        self._query = query
        self._sources: dict[str, TensorOrThunk | None] = {
            "features": features,
            "attention": attention,
        }

    def group(
        self, start: int, grid: Sequence[Grid], kind: Sequence[str], budget: int
    ) -> SelectionContext:
        """The context of the consecutive tokens that `grid` counts from `start` on.

        Tensors are views of this context's, and lazy ones are computed once, here.
        """
        size = sum(t * h * w for t, h, w in grid)
        stop = start + size
        part = SelectionContext(self._embeds[start:stop], grid, kind, seed=self.seed)
        part.budget, part.span, part._parent = budget, (start, stop), self.whole
        return part

    def __len__(self) -> int:
        return self.n

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.span[1] - self.span[0]

    @property
    def whole(self) -> SelectionContext:
        """The context of the entire input; itself where nothing was cut."""
        return self if self._parent is None else self._parent

    @property
    def device(self) -> torch.device:
        """Where the embeddings, and all tensors made here, live."""
        return self._embeds.device

    @cached_property
    def embeds(self) -> Tensor:
        """X [n, d], the dtype of the model. A copy: what is prefilled later stays untouched."""
        return self._embeds.clone()

    @cached_property
    def query(self) -> Tensor:
        """Z [m, d], embeddings of the current turn's text; [0, d] where there is none."""
        if self._parent is not None:
            return self._parent.query
        if self._query is None:
            return self._embeds.new_zeros(0, self._embeds.shape[1])
        return self._query.detach().to(self.device)

    @cached_property
    def features(self) -> Tensor:
        """F [n, d'], vision features before the merger, mean of each 2x2 group."""
        return self._sourced("features")

    @cached_property
    def attention(self) -> Tensor:
        """[n] fp32, attention that a token receives in the last vision block, within its frame."""
        return self._sourced("attention")

    @cached_property
    def salience(self) -> Tensor:
        """[n] fp32, `attention` times the tokens of the frame: 1 where it is spread evenly.

        Attention is a mean over queries, so that each frame's adds up to the same; without the
        factor a token of a small image would outrank every token of a large one.
        """
        sizes = [stop - start for start, stop in self.frame_spans]
        if len(set(sizes)) == 1:
            return self.attention.float() * sizes[0]
        return self.attention.float() * torch.tensor(sizes, device=self.device)[self.frame]

    @cached_property
    def unit_embeds(self) -> Tensor:
        """X with rows of length 1, fp32 [n, d]."""
        if self._parent is not None:
            return self._parent.unit_embeds[slice(*self.span)]
        return F.normalize(self._embeds.float(), dim=-1)

    @cached_property
    def unit_features(self) -> Tensor:
        """F with rows of length 1, fp32 [n, d']."""
        if self._parent is not None:
            return self._parent.unit_features[slice(*self.span)]
        return F.normalize(self.features.float(), dim=-1)

    @cached_property
    def unit_query(self) -> Tensor:
        """Z with rows of length 1, fp32 [m, d]."""
        if self._parent is not None:
            return self._parent.unit_query
        return F.normalize(self.query.float(), dim=-1)

    @cached_property
    def item_spans(self) -> list[Span]:
        """(start, stop) of each item, counted in this context."""
        return _spans([t * h * w for t, h, w in self.grid])

    @cached_property
    def frame_spans(self) -> list[Span]:
        """(start, stop) of each frame, counted in this context; an image is one frame."""
        return _spans([h * w for t, h, w in self.grid for _ in range(t)])

    @cached_property
    def item(self) -> Tensor:
        """[n] int64, which item a token belongs to: `grid[item]` is its grid."""
        return self._ids(self.item_spans)

    @cached_property
    def frame(self) -> Tensor:
        """[n] int64, a running frame number, unique over all items of this context."""
        return self._ids(self.frame_spans)

    @cached_property
    def generator(self) -> torch.Generator:
        """A CPU generator, fresh for each call of the selector.

        It depends on the seed and the place of the group alone, so that a draw is the same on
        every device and two frames do not draw the same pattern.
        """
        mixed = (self.seed + 0x9E3779B97F4A7C15 * self.span[0]) % 2**63
        return torch.Generator().manual_seed(mixed)

    def whole_item(self, index: int) -> Span:
        """(start, stop), counted in `whole`, of the item that our item `index` belongs to."""
        first = self.span[0] + self.item_spans[index][0]
        return next(span for span in self.whole.item_spans if span[0] <= first < span[1])

    def _ids(self, spans: list[Span]) -> Tensor:
        sizes = torch.tensor([stop - start for start, stop in spans], dtype=torch.long)
        return torch.arange(len(spans)).repeat_interleave(sizes).to(self.device)

    def _sourced(self, name: str) -> Tensor:
        if self._parent is not None:
            return getattr(self._parent, name)[slice(*self.span)]
        source = self._sources[name]
        if source is None:
            raise ValueError(f"this input carries no {name}, which the selector asked for")
        value = source() if callable(source) else source
        if value.shape[0] != self.n:
            raise ValueError(f"{name} must have {self.n} rows, got {list(value.shape)}")
        return value.detach().to(self.device)
