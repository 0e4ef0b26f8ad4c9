"""`raincheck-hf bench state-map`: is the join right, what does it cost, what does Φ hold (§B.6).

A stream of tokens is cut into a suffix and nested prefixes in front of it, each of which holds the
one before and more. The suffix is recorded once, behind the smallest; the state behind each larger
prefix is then taken by a join, and compared with running the recorded suffix token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from raincheck_hf.bench.checkpoints import check_device
from raincheck_hf.bench.collect import note_origins, open_rows
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.recorded import Recorded, record
from raincheck_hf.bench.rows import Row, key_of
from raincheck_hf.bench.stopwatch import microseconds
from raincheck_hf.bench.subjects import identity, load_subject
from raincheck_hf.bench.tables import Table
from raincheck_hf.kernels import suffix_map
from raincheck_hf.recurrent import Checkpoint, Factors

PREFIXES = 4
KEY = ("bench", "model", "weights", "device", "length", "suffix", "seed", "kernels", "layer")
_TIMED_TOKENS = 64
_TIMED_JOINS = 16


@dataclass(frozen=True)
class MapKernels:
    """What extends a suffix map and what joins with it.

    Attributes:
        name: For the rows.
        step: As `suffix_map.map_step`.
        join: As `suffix_map.join`.
    """

    name: str
    step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    join: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


PLAIN = MapKernels("plain", suffix_map.map_step, suffix_map.join)


def kernels_for(device: str) -> MapKernels:
    """The kernels that are measured on a device."""
    return PLAIN


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        model: A small model's name, a checkpoint's folder, or a key of `random_weights.SIZES`.
        suffixes: Suffix lengths, in tokens.
        length: Of the stream, in tokens.
        runs: Timed runs.
        seed: Fixes the stream.
        device: Where to run.
    """

    model: str = "qwen3_5"
    suffixes: tuple[int, ...] = (16, 128, 512, 2048)
    length: int = 4096
    runs: int = 9
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse before anything runs.

        Raises:
            ValueError: Names what is wrong and what is allowed.
        """
        check_device(self.device)
        identity(self.model)
        longest = self.length - PREFIXES
        if not self.suffixes or not all(4 <= suffix <= longest for suffix in self.suffixes):
            raise ValueError(
                f"suffix lengths must be 4 to {longest}, behind which a convolution of 4 no longer "
                f"reaches the prefix, in a stream of {self.length}; got {self.suffixes}"
            )


def run_state_map(plan: Plan, out: Path) -> list[Row]:
    """Measure what the file does not hold yet.

    Args:
        plan: What to measure.
        out: JSON Lines; created, or added to.

    Returns:
        A row for each recurrent layer and suffix length: `error`, of the join against the replay,
        and `replay_error`, of the fp32 replay against one in fp64, both as RMS over RMS and the
        largest over prefixes; `unjoined`, the error without a join; `norm`, mean and largest
        spectral norm of Φ over heads; `map_bytes`; `token_us`, `join_us` and `replay_us`.

    Raises:
        ValueError: The model has no recurrent layers.
    """
    file = open_rows(out, *KEY)
    subject = load_subject(plan.model, plan.device, "float32")
    kernels = kernels_for(plan.device)
    recorded = record(subject, plan.length, plan.seed)
    labels = [
        {
            "bench": "state_map", "model": plan.model, "weights": subject.weights,
            "device": plan.device.partition(":")[0], "length": plan.length, "suffix": suffix,
            "seed": plan.seed, "kernels": kernels.name, "layer": layer,
        }
        for layer in recorded for suffix in plan.suffixes
    ]  # fmt: skip
    wanted = [key_of(label, KEY) for label in labels]
    origin = provenance(plan.device)
    todo = [label for label, key in zip(labels, wanted, strict=True) if key not in file]
    for label in tqdm(todo, unit="suffix", disable=None):
        layer: Any = label["layer"]
        found = measure(recorded[layer], label["suffix"], kernels, plan.device, plan.runs)
        file.append([{**label, **found, **origin}])
    return file.rows(wanted)


def report_state_map(plan: Plan, out: Path) -> list[Row]:
    """`run_state_map`, with a table on the terminal."""
    start = time.monotonic()
    print(
        f"suffix maps of {plan.model}: {plan.length} tokens, inputs bf16, states fp32, "
        f"{PREFIXES} nested prefixes, seed {plan.seed}, {plan.device}"
    )
    rows = run_state_map(plan, out)
    note_origins(rows)
    layers = len({row["layer"] for row in rows})
    size = rows[0]["map_bytes"]
    print(f"\n{state_map_table(rows).text()}\n")
    print(f"a layer's map: {size:,} bytes; {layers} layers: {size * layers:,}, at every length")
    print(f"{time.monotonic() - start:.0f} s; rows: {out}")
    return rows


@torch.no_grad()
def measure(
    layer: Recorded, suffix: int, kernels: MapKernels, device: str, runs: int
) -> dict[str, Any]:
    """One layer at one suffix length; see `run_state_map`."""
    length = len(layer.factors)
    tokens = layer.part(length - suffix, length)
    prefixes = _nested(layer, length - suffix)
    reach = layer.conv.reach
    lead, tail = _cut(tokens, reach)
    phi = _map(layer, prefixes[0], tokens, kernels)
    before = layer.replayed(prefixes[0], lead)
    live = layer.replayed(before, tail)
    errors, replay_errors, unjoined = [], [], []
    for prefix in prefixes[1:]:
        moved = layer.replayed(prefix, lead)  # boundary repair
        joined = kernels.join(live.state, phi, moved.state, before.state)
        replayed = layer.replayed(moved, tail).state
        exact = layer.replayed(prefix, tokens, torch.float64).state
        errors.append(_off(joined, replayed))
        replay_errors.append(_off(replayed, exact))
        unjoined.append(_off(live.state, replayed))
        before, live = moved, Checkpoint(joined, live.history)
    norms = torch.linalg.matrix_norm(phi, ord=2)
    return {
        "prefixes": _ends(length - suffix),
        "error": max(errors),
        "replay_error": max(replay_errors),
        "unjoined": max(unjoined),
        "norm": {"mean": float(norms.mean()), "largest": float(norms.max())},
        "map_bytes": phi.numel() * phi.element_size(),
        **_times(layer, prefixes, tokens, kernels, device, runs),
    }


def _nested(layer: Recorded, stop: int) -> list[Checkpoint]:
    """Checkpoints at the ends of `PREFIXES` nested prefixes; the largest has ``stop`` tokens."""
    ends = _ends(stop)
    found = [layer.beginning()]
    for start, end in zip([0, *ends], ends, strict=False):
        found.append(layer.replayed(found[-1], layer.part(start, end)))
    return found[1:]


def _ends(stop: int) -> list[int]:
    return [stop * (at + 1) // PREFIXES for at in range(PREFIXES)]


def _cut(tokens: Factors, at: int) -> tuple[Factors, Factors]:
    inputs, g, beta = tokens.inputs, tokens.g, tokens.beta
    return Factors(inputs[:, :at], g[:at], beta[:at]), Factors(inputs[:, at:], g[at:], beta[at:])


def _map(layer: Recorded, prefix: Checkpoint, tokens: Factors, kernels: MapKernels) -> Tensor:
    """Φ [HV, K, K] over the tokens behind the lead."""
    conv = layer.conv
    keys, _ = conv.keys_values(prefix.history, tokens.inputs)
    phi = torch.eye(conv.key_dim, device=keys.device)
    phi = phi.expand(conv.value_heads, -1, -1).contiguous()
    for k, g, beta in list(zip(keys, tokens.g, tokens.beta, strict=True))[conv.reach :]:
        phi = kernels.step(phi, k, g, beta)
    return phi


def _off(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    difference = found.double() - wanted.double()
    return float(difference.norm() / wanted.double().norm())


def _times(
    layer: Recorded,
    prefixes: Sequence[Checkpoint],
    tokens: Factors,
    kernels: MapKernels,
    device: str,
    runs: int,
) -> dict[str, Any]:
    """Of one token's extension of the map, one join, and the replay that a join replaces."""
    phi = _map(layer, prefixes[0], tokens, kernels)
    first, last = prefixes[0].state, prefixes[-1].state
    keys, _ = layer.conv.keys_values(prefixes[0].history, tokens.inputs)
    steps = list(zip(keys, tokens.g, tokens.beta, strict=True))[-_TIMED_TOKENS:]

    def extend() -> None:
        grown = phi
        for k, g, beta in steps:
            grown = kernels.step(grown, k, g, beta)

    def join() -> None:
        for _ in range(_TIMED_JOINS):
            kernels.join(first, phi, last, first)

    few = min(len(tokens), _TIMED_TOKENS)
    some, _ = _cut(tokens, few)
    token = microseconds(lambda: layer.replayed(prefixes[-1], some), device, runs, share=few)
    return {
        "token_us": microseconds(extend, device, runs, share=len(steps)),
        "join_us": microseconds(join, device, runs, share=_TIMED_JOINS),
        # A replay runs every token of the suffix; the time of a token does not depend on them.
        "replay_us": {name: value * len(tokens) for name, value in token.items()},
    }


def state_map_table(rows: Sequence[Row]) -> Table:
    """One line for each layer and suffix length."""
    body = [
        [
            str(row["layer"]), str(row["suffix"]), f"{row['error']:.1e}",
            f"{row['replay_error']:.1e}", f"{row['unjoined']:.1e}", f"{row['norm']['mean']:.3g}",
            f"{row['norm']['largest']:.3g}", f"{row['token_us']['p50']:.1f}",
            f"{row['join_us']['p50']:.1f}", f"{row['replay_us']['p50']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = [
        "layer", "suffix", "join error", "replay's own", "without join", "‖Φ‖ mean", "largest",
        "map, a token [µs]", "join [µs]", "replay instead [µs]",
    ]  # fmt: skip
    return Table(f"suffix maps, {rows[0]['model']}, {rows[0]['machine']}", head, body, left=0)
