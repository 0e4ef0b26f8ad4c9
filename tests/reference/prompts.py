"""One turn: its input, after the vision tower and before the language model, and its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A turn's new rows, in source order.

    Attributes:
        embeds: Merged input embeddings, [L, d].
        positions: M-RoPE positions in the full prompt, [3, L].
        visual: Which rows are multimodal, bool [L].
        deepstack: For each of the first text layers its features of the visual rows,
            [visual rows, d], or None.
        selected: Which rows belong to P, bool [L]: all text, the selected visual rows, and
            the last row.
        order: Rows of D in the order of restoration; None for source order.
    """

    embeds: Tensor
    positions: Tensor
    visual: Tensor
    deepstack: list[Tensor] | None
    selected: Tensor
    order: list[int] | None = None

    def __post_init__(self) -> None:
        if not bool((self.selected | self.visual).all()):
            raise ValueError("every text row belongs to P")
        if not bool(self.selected[-1]):
            raise ValueError("the last row belongs to P")
        if sorted(self.deferred) != (~self.selected).nonzero().flatten().tolist():
            raise ValueError(f"order={self.order} is not an order of the deferred rows")

    @property
    def initial(self) -> list[int]:
        """Rows of P."""
        return self.selected.nonzero().flatten().tolist()

    @property
    def deferred(self) -> list[int]:
        """Rows of D, in the order of restoration."""
        if self.order is not None:
            return list(self.order)
        return (~self.selected).nonzero().flatten().tolist()

    @property
    def next_position(self) -> int:
        """Where y1 stands, on all three axes: behind the height and width of the last row.

        Not behind the largest position: on Qwen2.5-VL the time of a video counts seconds, and may
        run far ahead of the text behind it.
        """
        return int(self.positions[1:, -1].max()) + 1

    def features(self, row: int) -> list[Tensor]:
        """The DeepStack features to add to a row after layers 0, 1, ...; each [d]."""
        if self.deepstack is None or not bool(self.visual[row]):
            return []
        rank = int(self.visual[:row].sum())
        return [layer[rank] for layer in self.deepstack]


@dataclass(frozen=True)
class Turn:
    """A turn whose answer is known.

    Attributes:
        prompt: The turn's input.
        tokens: The generated tokens that are consumed, y_1 ... y_T.
        restored_per_step: How many rows of D ride in the pass of each, T numbers; what is
            left is restored after the answer.
    """

    prompt: Prompt
    tokens: list[int]
    restored_per_step: list[int]


@torch.no_grad()
def prompt_from_inputs(
    model: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    selected: Iterable[int] | Tensor | None = None,
    start: int = 0,
) -> Prompt:
    """Build a turn's prompt from what a processor gives for the whole conversation.

    The model's own vision tower, embeddings and `get_rope_index` are used: they are not
    under test.

    Args:
        model: The `...ForConditionalGeneration`.
        inputs: Batch of one: `input_ids`, `mm_token_type_ids` and, where there are any,
            pixel values and grids of images and videos, and `second_per_grid_ts` of videos.
        selected: Places in `input_ids` of the visual rows in P; None for all. Text rows and
            the last row are always in P and may be listed.
        start: First row of this turn, 0 for the first turn.
    """
    ids = inputs["input_ids"][0]
    embeds = model.get_input_embeddings()(ids)
    visual = torch.zeros_like(ids, dtype=torch.bool)
    deepstack: dict[int, Tensor] = {}
    for pixels, grid, token, encode in (
        ("pixel_values", "image_grid_thw", "image_token_id", model.model.get_image_features),
        ("pixel_values_videos", "video_grid_thw", "video_token_id", model.model.get_video_features),
    ):
        if inputs.get(pixels) is None:
            continue
        rows = ids == getattr(model.config, token)
        features = encode(inputs[pixels], inputs[grid], return_dict=True)
        embeds[rows] = torch.cat(list(features.pooler_output)).to(embeds.dtype)
        visual |= rows
        for layer, parts in enumerate(getattr(features, "deepstack_features", None) or []):
            placed = deepstack.setdefault(layer, torch.zeros_like(embeds))
            placed[rows] = torch.cat(list(parts)).to(embeds.dtype)

    grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    if "second_per_grid_ts" in inputs:
        grids["second_per_grid_ts"] = inputs["second_per_grid_ts"]
    positions, _ = model.model.get_rope_index(
        ids[None], mm_token_type_ids=inputs["mm_token_type_ids"], **grids
    )
    in_p = ~visual
    in_p[-1] = True
    if selected is None:
        in_p[:] = True
    else:
        in_p[torch.as_tensor(list(selected), dtype=torch.long)] = True
    visual = visual[start:]
    return Prompt(
        embeds=embeds[start:],
        positions=positions[:, 0, start:],
        visual=visual,
        deepstack=[deepstack[i][start:][visual] for i in sorted(deepstack)] or None,
        selected=in_p[start:],
    )
