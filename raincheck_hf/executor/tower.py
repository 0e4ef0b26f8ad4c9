"""The lean vision tower: a handful of launches a block, frames of one size batched.

Stock attention without flash attention loops over images and frames in Python, and rotates in
several fp32 passes over memory; both cost more than the arithmetic. Results are the stock tower's
within rounding. Weights are the modules' own, read at every pass.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from raincheck_hf.executor.capturing import Recorder
from raincheck_hf.executor.plain import Census, unplain
from raincheck_hf.executor.vision_blocks import Segments, run_blocks
from raincheck_hf.models.vision import TowerPass

_TABLES = 8  # grids whose position tables are kept
_GRAPHS = 4  # grids whose launches are kept captured
_MOST_CAPTURED = 8192  # patches; more keep the GPU busy for longer than their launches take
_KNOWN = ("Qwen3VLVisionModel", "Qwen3_5VisionModel")


@dataclass(frozen=True)
class _Tables:
    """What depends on the grid alone.

    Attributes:
        indices: int64 [N, taps] of the position embedding.
        weights: [N, taps] of them.
        cos: fp32 [N, e / 2].
        sin: fp32 [N, e / 2].
        segments: Who attends to whom.
    """

    indices: Tensor
    weights: Tensor
    cos: Tensor
    sin: Tensor
    segments: Segments


@dataclass(frozen=True)
class _Captured:
    """A captured pass: its input's place, the tables that it reads, and what it makes."""

    graph: Any
    given: Tensor
    tables: _Tables
    made: TowerPass

    def run(self, pixel_values: Tensor) -> TowerPass:
        self.given.copy_(pixel_values)
        self.graph.replay()
        made = self.made
        return replace(
            made,
            embeds=made.embeds.clone(),
            deepstack=[layer.clone() for layer in made.deepstack],
            merger_input=made.merger_input.clone(),
            queries_keys=made.queries_keys.clone(),
            normaliser=None if made.normaliser is None else made.normaliser.clone(),
        )


class LeanTower:
    """Runs one model's vision tower; keeps position tables and captured passes."""

    def __init__(self, tower: Any) -> None:
        self._census = Census(tower)
        self._fits: bool | None = None
        self._seen: set[Any] = set()
        self._graphs: OrderedDict[Any, _Captured] = OrderedDict()
        self._recorder: Recorder | None = None
        self._tables: OrderedDict[Any, _Tables] = OrderedDict()

    def fits(self, tower: Any) -> bool:
        """Whether the lean tower computes what this one does, and nobody hooked into it."""
        if self._fits is None or not self._census.holds():
            self._census, self._fits = Census(tower), _plain(tower)
            self._graphs.clear()
            self._tables.clear()  # how segments attend depends on the dtype
            self._recorder = None
        return self._fits

    def run(self, tower: Any, pixel_values: Tensor, grid: list[list[int]]) -> TowerPass:
        """One pass over images or videos.

        A small input is bound by its launches; one whose sizes come again is captured.

        Args:
            tower: The vision tower.
            pixel_values: [N, c] patches on the tower's device.
            grid: (t, h, w) in patches of each image or video.
        """
        pixel_values = pixel_values.to(tower.patch_embed.proj.weight.dtype)
        tables = self._positions(tower, grid, pixel_values.device)
        key = (tuple(map(tuple, grid)), pixel_values.device)
        if key not in self._graphs:
            again = key in self._seen
            self._seen.add(key)
            if not (again and pixel_values.is_cuda and len(pixel_values) <= _MOST_CAPTURED):
                return self._launch(tower, pixel_values, tables)
            captured = self._capture(tower, pixel_values, tables)
            if captured is None:
                return self._launch(tower, pixel_values, tables)
            self._graphs[key] = captured
            while len(self._graphs) > _GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key].run(pixel_values)

    def _capture(self, tower: Any, pixel_values: Tensor, tables: _Tables) -> _Captured | None:
        """What graphs return is copied before the next one runs. None without memory for it."""
        self._recorder = self._recorder or Recorder(pixel_values.device)
        with torch.inference_mode(False):  # written again for every picture
            given = torch.empty_like(pixel_values)
        recorded = self._recorder.record(partial(self._launch, tower, given, tables))
        return recorded and _Captured(recorded[0], given, tables, recorded[1])

    def _launch(self, tower: Any, pixel_values: Tensor, tables: _Tables) -> TowerPass:
        embed = tower.patch_embed.proj
        x = linear(pixel_values, embed.weight.flatten(1), embed.bias)
        places = (tower.pos_embed(tables.indices) * tables.weights[:, :, None]).sum(1)
        turns = tables.cos, tables.sin
        done = run_blocks(tower, x, places.to(x.dtype), turns, tables.segments)
        return TowerPass(
            embeds=tower.merger(done.x),
            deepstack=done.deepstack,
            merger_input=done.x,
            queries_keys=done.qkv[:, :2],
            normaliser=done.normaliser,
            lengths=list(tables.segments.lengths),
        )

    def _positions(self, tower: Any, grid: list[list[int]], device: torch.device) -> _Tables:
        """The grid's tables, made where they are not known."""
        key = (tuple(map(tuple, grid)), device)
        if key not in self._tables:
            on_device = torch.tensor(grid, device=device)
            indices, weights = get_vision_interpolation_indices_and_weights(
                on_device,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
            )
            places = get_vision_position_ids(on_device, tower.spatial_merge_size)
            cos, sin = tower.rotary_pos_emb(indices, places)
            half = cos.shape[1] // 2
            self._tables[key] = _Tables(
                indices=indices,
                weights=weights,
                cos=cos[:, :half].float().contiguous(),
                sin=sin[:, :half].float().contiguous(),
                segments=Segments.of(tower, [h * w for t, h, w in grid for _ in range(t)], device),
            )
            while len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]


def _plain(tower: Any) -> bool:
    config = tower.config
    return (
        type(tower).__name__ in _KNOWN
        and len({parameter.dtype for parameter in tower.parameters()}) == 1
        and config.hidden_act == "gelu_pytorch_tanh"
        and config._attn_implementation in ("sdpa", "eager")
        and next(unplain(tower, "the tower", (nn.Linear, nn.LayerNorm)), None) is None
    )
