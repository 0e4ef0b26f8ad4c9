"""Raincheck by its rules: one row at a time, each seeing a list of rows written out.

The rules are those of the semantics: P before D before Y in logical order, visibility by
region, positions of the full prompt, recurrent layers running a chunk from the prefix
checkpoint and a decode row from the live state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import attention, gdn
from .feed_forward import feed_forward
from .gdn import GdnRecord, GdnState
from .parameters import TextParameters, rms_norm
from .prompts import Prompt, Turn


@dataclass(frozen=True)
class Row:
    """What a consumed token leaves behind, by layer.

    Attributes:
        keys: In attention layers, [Hkv, hd].
        values: In attention layers, [Hkv, hd].
        records: In recurrent layers.
    """

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    records: dict[int, GdnRecord]


class Reference:
    """A conversation under Raincheck.

    Attributes:
        past: Rows of earlier turns, in logical order.
        initial: Rows of this turn's P.
        restored: Rows of this turn's D restored so far.
        suffix: Rows of this turn's Y.
        deferred: Places in the prompt of the rows of D not restored yet.
        checkpoint: By recurrent layer, the state after P and the restored D.
        live: By recurrent layer, the state after P, the restored D and Y.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype = torch.float64,
        correct_state: bool = True,
    ):
        """Start an empty conversation.

        Args:
            model: A `...ForConditionalGeneration` of the Qwen family.
            dtype: Of all arithmetic.
            correct_state: False leaves the live state uncorrected when the checkpoint moves,
                which is wrong on purpose: tests show with it that the correction matters.
        """
        self.text = TextParameters.read(model, dtype)
        self.dtype = dtype
        self.correct_state = correct_state
        self.past: list[Row] = []
        self.initial: list[Row] = []
        self.restored: list[Row] = []
        self.suffix: list[Row] = []
        self.prompt: Prompt | None = None
        self.deferred: list[int] = []
        self.live: dict[int, GdnState] = {
            index: gdn.initial_state(self.text, index)
            for index in range(len(self.text.layers))
            if self.text.is_recurrent(index)
        }
        self.checkpoint = self.live

    @torch.no_grad()
    def prefill(self, prompt: Prompt) -> Tensor:
        """Consume P of a new turn; everything so far becomes its prefix.

        Returns:
            Logits of y1, [vocab].
        """
        if self.deferred:
            raise ValueError(
                f"{len(self.deferred)} deferred rows of the last turn are left: "
                "call complete() or drop_deferred() first"
            )
        self.past = self.rows
        self.initial, self.restored, self.suffix = [], [], []
        self.prompt = prompt
        self.deferred = prompt.deferred
        for place in prompt.initial:
            hidden, row, self.live = self._consume_prompt_row(place, self.rows, self.live)
            self.initial.append(row)
        self.checkpoint = self.live
        return self.text.logits(hidden)

    @torch.no_grad()
    def decode(self, token: int, chunk: int = 0) -> Tensor:
        """The pass that consumes the next generated token and restores up to `chunk` rows.

        Neither sees the other: the rows of the chunk see P and the restored D, the token
        what was there before the pass.

        Returns:
            Logits of the token after it, [vocab].
        """
        position = self.prompt.next_position + len(self.suffix)
        hidden, row, live = self._consume(
            self.text.embed[token], torch.full((3,), position), [], self.rows, self.live
        )
        self._restore(chunk)
        self.suffix.append(row)
        self.live = self._replayed() if self.correct_state else live
        return self.text.logits(hidden)

    @torch.no_grad()
    def complete(self) -> None:
        """Restore what is left of D after the answer."""
        self._restore(len(self.deferred))
        if self.correct_state:
            self.live = self._replayed()

    def drop_deferred(self) -> None:
        """Forget what is left of D for good, as hard pruning does."""
        self.deferred = []

    def rollback(self) -> None:
        """Drop Y: back to the end of this turn's input, P and D complete."""
        self.complete()
        self.suffix = []
        self.live = self.checkpoint

    def run(self, turn: Turn) -> Tensor:
        """Prefill a turn and decode its known answer, left without completion.

        Returns:
            Logits of y_1, then those after each consumed token, [T + 1, vocab].
        """
        logits = [self.prefill(turn.prompt)]
        for token, chunk in zip(turn.tokens, turn.restored_per_step, strict=True):
            logits.append(self.decode(token, chunk))
        return torch.stack(logits)

    def generate(
        self, prompt: Prompt, new_tokens: int, chunk: int = 31, guard: int = 16
    ) -> tuple[list[int], Tensor]:
        """One greedy turn, left without completion; the last token is not consumed.

        Returns:
            The tokens, and the logits each was taken from, [new_tokens, vocab].
        """
        logits = [self.prefill(prompt)]
        tokens = [int(logits[-1].argmax())]
        for rows in schedule(len(self.deferred), new_tokens - 1, chunk, guard):
            logits.append(self.decode(tokens[-1], rows))
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.stack(logits)

    @property
    def rows(self) -> list[Row]:
        """All rows there are, in logical order."""
        return self.past + self.initial + self.restored + self.suffix

    def keys(self, layer: int) -> Tensor:
        """Keys of an attention layer in logical order, [Hkv, n, hd]."""
        return torch.stack([row.keys[layer] for row in self.rows], 1)

    def values(self, layer: int) -> Tensor:
        """Values of an attention layer in logical order, [Hkv, n, hd]."""
        return torch.stack([row.values[layer] for row in self.rows], 1)

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers that have keys and values; the others are recurrent."""
        return [i for i in range(len(self.text.layers)) if not self.text.is_recurrent(i)]

    def _restore(self, count: int) -> None:
        """Restore the next `count` rows of D: they see P and D, and run from the checkpoint."""
        for place in self.deferred[:count]:
            seen = self.past + self.initial + self.restored
            _, row, self.checkpoint = self._consume_prompt_row(place, seen, self.checkpoint)
            self.restored.append(row)
        self.deferred = self.deferred[count:]

    def _replayed(self) -> dict[int, GdnState]:
        """The live state: the whole suffix, token by token, from the checkpoint."""
        return {
            layer: gdn.replay(self.text, layer, [row.records[layer] for row in self.suffix], state)
            for layer, state in self.checkpoint.items()
        }

    def _consume_prompt_row(
        self, place: int, seen: list[Row], states: dict[int, GdnState]
    ) -> tuple[Tensor, Row, dict[int, GdnState]]:
        prompt = self.prompt
        features = [feature.to(self.dtype) for feature in prompt.features(place)]
        embed = prompt.embeds[place].to(self.dtype)
        return self._consume(embed, prompt.positions[:, place], features, seen, states)

    def _consume(
        self,
        hidden: Tensor,
        position: Tensor,
        features: list[Tensor],
        seen: list[Row],
        states: dict[int, GdnState],
    ) -> tuple[Tensor, Row, dict[int, GdnState]]:
        """Run one row through all layers.

        Args:
            hidden: Input embedding, [d].
            position: [3].
            features: DeepStack features to add after layers 0, 1, ...; each [d].
            seen: The rows it attends to, besides itself.
            states: What it meets in the recurrent layers.

        Returns:
            The last hidden row [d], what the row leaves behind, and the states after it.
        """
        text, eps = self.text, self.text.config.rms_norm_eps
        row, after = Row({}, {}, {}), {}
        for index, layer in enumerate(text.layers):
            x = rms_norm(hidden, layer["input_layernorm.weight"], eps)
            if text.is_recurrent(index):
                token = row.records[index] = gdn.record(text, index, x)
                heads, after[index] = gdn.step(text, index, token, states[index])
                hidden = hidden + gdn.output(text, index, x, heads)
            else:
                q, k, v, gate = attention.project(text, index, x[None], position[:, None])
                row.keys[index], row.values[index] = k[0], v[0]
                keys = torch.stack([other.keys[index] for other in [*seen, row]])
                values = torch.stack([other.values[index] for other in [*seen, row]])
                visible = torch.ones(1, len(keys), dtype=torch.bool, device=keys.device)
                attended = attention.attend(q, keys, values, visible)
                hidden = hidden + attention.output(text, index, attended, gate)[0]
            x = rms_norm(hidden, layer["post_attention_layernorm.weight"], eps)
            hidden = hidden + feed_forward(text, index, x)
            if index < len(features):
                hidden = hidden + features[index]
        return hidden, row, after


def schedule(deferred: int, passes: int, chunk: int, guard: int) -> list[int]:
    """How many rows of D ride in each decode pass: none in the first `guard`, then chunks."""
    rows = []
    for number in range(1, passes + 1):
        riding = min(chunk, deferred) if number > guard else 0
        deferred -= riding
        rows.append(riding)
    return rows
