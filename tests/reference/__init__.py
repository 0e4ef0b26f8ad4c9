"""An independent, slow simulation of Raincheck: the oracle the implementation is tested against.

One token at a time, in plain PyTorch, from the model's parameters alone. No cache class, no
chunked delta rule, no suffix map and no join, so that a mistake in one of those cannot be
shared by the test.

Shapes use one legend: L rows of a prompt, n and m any number of rows, d hidden size, H query
heads, Hkv key-value heads, hd head size, HV value heads, K and V the key and value sizes of
a recurrent head, C channels of the short convolution, P, D, Y the regions of a turn.
"""

from . import gdn
from .masked_forward import MaskedForward, one_masked_forward, visibility
from .prompts import Prompt, Turn, prompt_from_inputs
from .random_inputs import LAYOUTS, next_turn, random_inputs, random_selection
from .random_models import ARCHITECTURES, random_model
from .simulation import Reference, schedule
from .spied_vision import SpiedVision

__all__ = [
    "ARCHITECTURES",
    "LAYOUTS",
    "MaskedForward",
    "Prompt",
    "Reference",
    "SpiedVision",
    "Turn",
    "gdn",
    "next_turn",
    "one_masked_forward",
    "prompt_from_inputs",
    "random_inputs",
    "random_model",
    "random_selection",
    "schedule",
    "visibility",
]
