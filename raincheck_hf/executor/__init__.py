"""Ways to run a pass."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from typing import Any
from weakref import WeakSet

import torch

from raincheck_hf.executor.base import Executor, Pass, PassResult, Token
from raincheck_hf.executor.modules import ModulesExecutor

_log = logging.getLogger("raincheck_hf")
_MODULES = ModulesExecutor()
_told: WeakSet[Any] = WeakSet()


def choose_executor(name: str, model: Any) -> Executor:
    """The executor for a config's choice.

    ``"auto"`` takes ``fused`` for plain bf16 or fp16 weights on one CUDA device, and ``modules``
    elsewhere; which one and why is logged once a model. Nothing is built before it is needed.

    Args:
        name: ``"auto"``, ``"modules"`` or ``"fused"``.
        model: What it will run.

    Raises:
        ValueError: ``"fused"`` cannot run this model here; says why.
    """
    if name == "modules":
        return _MODULES
    known = _known_fused(model)
    if known is not None and (name == "fused" or known.plan.dtype != torch.float32):
        return known
    reason = _why_not_fused(model, demanded=name == "fused")
    if reason is not None:
        if name == "fused":
            raise ValueError(
                f"executor 'fused' cannot run this model: {reason}. Use 'auto' or 'modules'"
            )
        _tell(model, f"raincheck runs on executor 'modules': {reason}")
        return _MODULES
    from raincheck_hf.executor.fused import new_executor

    _tell(model, "raincheck runs on executor 'fused'")
    return new_executor(model)


def _known_fused(model: Any) -> Any:
    """The executor made earlier; nothing is imported to find that there is none."""
    fused = sys.modules.get("raincheck_hf.executor.fused")
    return None if fused is None else fused.known_executor(model)


def _why_not_fused(model: Any, demanded: bool) -> str | None:
    device = model.device
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the weights are on {device}, not on a CUDA device"
    if not demanded and device.type != "cuda":
        return "the kernels are interpreted, which is for tests"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from raincheck_hf.executor.plan import why_not

    return why_not(model, demanded)


def _tell(model: Any, message: str) -> None:
    if model not in _told:
        _told.add(model)
        _log.info(message)


__all__ = ["Executor", "Pass", "PassResult", "Token", "choose_executor"]
