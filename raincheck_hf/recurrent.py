"""What a recurrent (GDN) layer remembers of a conversation, as values that never change in place.

A pass computes new ``RecurrentState`` objects and the cache publishes them together at its end, so
a pass that fails leaves the old ones untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raincheck_hf.kernels import suffix_map
from raincheck_hf.kernels.suffix_map import Convolution


@dataclass(frozen=True)
class Checkpoint:
    """A point in the stream from which a recurrent layer can go on.

    Attributes:
        state: fp32 [HV, K, V].
        history: [C, W - 1], the last pre-convolution inputs.
    """

    state: Tensor
    history: Tensor

    def advanced(self, state: Tensor, inputs: Tensor) -> Checkpoint:
        """After tokens with these pre-convolution ``inputs`` [C, T] led to ``state``."""
        reach = self.history.shape[-1]
        tail = inputs[:, -reach:].to(self.history.dtype)
        return Checkpoint(state, torch.cat([self.history, tail], dim=-1)[:, -reach:])


@dataclass(frozen=True)
class Factors:
    """What suffix tokens did: pre-convolution inputs [C, T], g and beta fp32 [T, HV]."""

    inputs: Tensor
    g: Tensor
    beta: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[-1]

    def followed_by(self, other: Factors) -> Factors:
        return Factors(
            torch.cat([self.inputs, other.inputs], dim=-1),
            torch.cat([self.g, other.g]),
            torch.cat([self.beta, other.beta]),
        )


@dataclass(frozen=True)
class RecurrentState:
    """One layer's memory within one turn.

    Attributes:
        prefix: The checkpoint at the end of P and the restored part of D, before y1.
        live: The state after the suffix Y.
        lead: Factors of the first suffix tokens, whose convolution reaches back over the boundary.
        lead_state: fp32 [HV, K, V] after the lead tokens, from the current ``prefix``.
        phi: fp32 [HV, K, K] over the suffix tokens behind the lead; None while there are none.
    """

    prefix: Checkpoint
    live: Checkpoint
    lead: Factors | None = None
    lead_state: Tensor | None = None
    phi: Tensor | None = None

    @classmethod
    def at(cls, checkpoint: Checkpoint) -> RecurrentState:
        """An empty suffix behind ``checkpoint``."""
        return cls(prefix=checkpoint, live=checkpoint)

    def without_answer(self) -> RecurrentState:
        """Drop the suffix: back to the prefix checkpoint."""
        return RecurrentState.at(self.prefix)

    def consumed(self, state: Tensor, inputs: Tensor) -> RecurrentState:
        """After a suffix token that needs no record, because nothing is pending."""
        return RecurrentState(prefix=self.prefix, live=self.live.advanced(state, inputs))

    def recorded(self, conv: Convolution, state: Tensor, token: Factors) -> RecurrentState:
        """After one suffix token, with its factors kept for later joins.

        Args:
            conv: The layer's convolution.
            state: fp32 [HV, K, V], the live state after the token.
            token: The token's factors, T = 1.
        """
        live = self.live.advanced(state, token.inputs)
        if self.lead is None:
            return replace(self, live=live, lead=token, lead_state=state)
        if len(self.lead) < conv.reach:
            return replace(self, live=live, lead=self.lead.followed_by(token), lead_state=state)
        keys, _ = conv.keys_values(self.live.history, token.inputs)
        phi = self.phi
        if phi is None:
            heads, dim = keys.shape[1:]
            phi = torch.eye(dim, device=keys.device).expand(heads, dim, dim)
        return replace(
            self, live=live, phi=suffix_map.map_step(phi, keys[0], token.g[0], token.beta[0])
        )

    def moved(self, conv: Convolution, prefix: Checkpoint) -> RecurrentState:
        """After a chunk of D moved the checkpoint to ``prefix``: boundary repair, then join."""
        if self.lead is None:
            return RecurrentState.at(prefix)
        lead_state = suffix_map.replay(
            conv, prefix.state, prefix.history, self.lead.inputs, self.lead.g, self.lead.beta
        )
        if self.phi is None:
            state = lead_state
        else:
            assert self.lead_state is not None  # set together with lead
            state = suffix_map.join(self.live.state, self.phi, lead_state, self.lead_state)
        # With fewer suffix tokens than the convolution reaches back, the live window still holds
        # inputs from before the boundary; with enough of them this is the window it already had.
        window = self.live.history
        if len(self.lead) < conv.reach:
            window = prefix.advanced(state, self.lead.inputs).history
        return replace(self, prefix=prefix, live=Checkpoint(state, window), lead_state=lead_state)

    def settled(self) -> RecurrentState:
        """Forget the suffix's factors: nothing is pending any more."""
        return RecurrentState(prefix=self.prefix, live=self.live)
