"""Run measures on a model with random weights of a real size, and keep their rows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raincheck_hf import enable_raincheck
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.latency.layers import recurrent_layer
from raincheck_hf.bench.latency.measures import MEASURES
from raincheck_hf.bench.latency.start import start
from raincheck_hf.bench.random_weights import build

# Beside those that take the model: one GDN layer alone, and first calls of new processes.
ALONE = {"recurrent_layer": recurrent_layer, "start": start}


def run(size: str, device: str, out: Path, measures: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run measures and append their rows.

    Args:
        size: A name of ``random_weights.SIZES``.
        device: Where to run.
        out: The file of rows.
        measures: Names of ``MEASURES`` or ``ALONE``; empty for all.

    Raises:
        ValueError: An unknown measure.
    """
    known = [*MEASURES, *ALONE]
    unknown = set(measures) - set(known)
    if unknown:
        raise ValueError(f"unknown measures {sorted(unknown)}; known: {', '.join(known)}")
    model = None
    origin = {"model": size, **provenance(device)}
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in measures or known:
        started = time.perf_counter()
        if name in ALONE:
            found = ALONE[name](size, device)
        else:
            model = model or enable_raincheck(build(size, device))
            found = MEASURES[name](model)
        row = {"measure": name, **found, **origin}
        rows.append(row)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name} ({time.perf_counter() - started:.1f} s)", flush=True)
        for key, value in found.items():
            print(f"  {key:32} {value}", flush=True)
    return rows
