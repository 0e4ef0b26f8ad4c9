"""Raincheck on a pure attention model as one forward pass under an explicit mask.

A second oracle, which shares with the simulation only the maths inside a layer: all rows of
all turns stand in one matrix, and who sees whom is a table made from the words of the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import attention
from .feed_forward import feed_forward
from .parameters import TextParameters, rms_norm
from .prompts import Turn


@dataclass(frozen=True)
class MaskedForward:
    """What one masked forward gives.

    Attributes:
        logits: For each turn, [T + 1, vocab]: y_1's, then those after each consumed token.
        keys: By layer, [Hkv, n, hd] in logical order, every D complete.
        values: Like `keys`.
    """

    logits: list[Tensor]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]


@dataclass(frozen=True)
class Place:
    """Where a row stands: turn, region "P", "D" or "Y", index in the region from 1.

    For a row of D, `restored_in` is the number of the decode pass that restored it.
    """

    turn: int
    region: str
    index: int
    restored_in: int | None = None


def sees(row: Place, other: Place) -> bool:
    """Whether `row` attends to `other`."""
    if row.turn != other.turn:
        return other.turn < row.turn
    if row.region == "P":
        return other.region == "P" and other.index <= row.index
    if row.region == "D":
        # All of P; the D before it, of its own chunk or of an earlier one; never Y.
        return other.region == "P" or (other.region == "D" and other.index <= row.index)
    if other.region == "D":
        # Restored in the pass that consumes y_t: visible from y_{t+1} on.
        return other.restored_in < row.index
    return other.region == "P" or other.index <= row.index


def places(turns: list[Turn]) -> list[Place]:
    """All rows in logical order: P, D, Y of the first turn, then of the next."""
    rows = []
    for number, turn in enumerate(turns):
        initial, deferred = len(turn.prompt.initial), len(turn.prompt.deferred)
        arrival = []
        for step, count in enumerate(turn.restored_per_step, start=1):
            arrival += [step] * count
        after_the_answer = len(turn.tokens) + 1
        arrival += [after_the_answer] * (deferred - len(arrival))
        if len(arrival) != deferred or len(turn.restored_per_step) != len(turn.tokens):
            raise ValueError(f"{turn.restored_per_step} does not fit {deferred} deferred rows")
        rows += [Place(number, "P", i + 1) for i in range(initial)]
        rows += [Place(number, "D", i + 1, arrival[i]) for i in range(deferred)]
        rows += [Place(number, "Y", i + 1) for i in range(len(turn.tokens))]
    return rows


def visibility(turns: list[Turn]) -> Tensor:
    """The table: bool [n, n], row i sees row j."""
    rows = places(turns)
    return torch.tensor([[sees(row, other) for other in rows] for row in rows])


@torch.no_grad()
def one_masked_forward(
    model: torch.nn.Module, turns: list[Turn], dtype: torch.dtype = torch.float64
) -> MaskedForward:
    """Run all turns in one forward. Pure attention models only."""
    text = TextParameters.read(model, dtype)
    if any(text.is_recurrent(index) for index in range(len(text.layers))):
        raise ValueError("one forward cannot stand for recurrent layers: use Reference")
    rows, visible = places(turns), visibility(turns).to(text.embed.device)

    hidden, positions, features = [], [], []
    for turn in turns:
        prompt = turn.prompt
        for place in prompt.initial + prompt.deferred:
            hidden.append(prompt.embeds[place].to(dtype))
            positions.append(prompt.positions[:, place])
            features.append(prompt.features(place))
        for step, token in enumerate(turn.tokens):
            hidden.append(text.embed[token])
            positions.append(torch.full((3,), prompt.next_position + step))
            features.append([])
    hidden = torch.stack(hidden)
    positions = torch.stack([position.cpu() for position in positions], 1)

    keys, values = {}, {}
    for index, layer in enumerate(text.layers):
        eps = text.config.rms_norm_eps
        x = rms_norm(hidden, layer["input_layernorm.weight"], eps)
        q, k, v, gate = attention.project(text, index, x, positions)
        keys[index], values[index] = k.transpose(0, 1), v.transpose(0, 1)
        attended = attention.attend(q, k, v, visible)
        hidden = hidden + attention.output(text, index, attended, gate)
        x = rms_norm(hidden, layer["post_attention_layernorm.weight"], eps)
        hidden = hidden + feed_forward(text, index, x)
        for i, row_features in enumerate(features):
            if index < len(row_features):
                hidden[i] += row_features[index].to(dtype)

    logits = text.logits(hidden)
    answers = []
    for number, turn in enumerate(turns):
        last = Place(number, "P", len(turn.prompt.initial))
        wanted = [i for i, row in enumerate(rows) if row == last]
        wanted += [i for i, row in enumerate(rows) if (row.turn, row.region) == (number, "Y")]
        answers.append(logits[wanted])
    return MaskedForward(answers, keys, values)
