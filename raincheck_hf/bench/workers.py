"""Spread jobs over processes: small models on a CPU gain nothing from threads within a pass."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache

import torch

from raincheck_hf.bench.checkpoints import load
from raincheck_hf.bench.measure import measure
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.settings import Job, Label, Measurement

Work = tuple[Job, list[Label]]

_loaded = cache(load)


def run(measurement: Measurement, work: list[Work], processes: int) -> Iterator[list[Row]]:
    """Measure, and hand out each job's rows as soon as they are there.

    Args:
        measurement: What the rows belong to.
        work: Jobs, and which of their rows to measure.
        processes: With 1 everything runs in this one.
    """
    if processes <= 1 or len(work) <= 1:
        for item in work:
            yield _one(measurement, item)
        return
    context = multiprocessing.get_context("spawn")  # forked threads and CUDA do not get on
    with ProcessPoolExecutor(min(processes, len(work)), context, _prepare) as pool:
        futures = [pool.submit(_one, measurement, item) for item in work]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def hush() -> None:
    """No loading bars and no advice from transformers in this process's output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _prepare() -> None:
    torch.set_num_threads(1)
    hush()


def _one(measurement: Measurement, work: Work) -> list[Row]:
    job, labels = work
    model, processor = _loaded(job.model, measurement.device, measurement.dtype)
    return measure(model, processor, measurement, job, labels)
