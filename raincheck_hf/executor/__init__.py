"""Ways to run a pass."""

from __future__ import annotations

from raincheck_hf.executor.base import Executor, Pass, PassResult
from raincheck_hf.executor.modules import ModulesExecutor

_MODULES = ModulesExecutor()


def choose_executor(name: str) -> Executor:
    """The executor for a config's choice.

    Raises:
        ValueError: ``"fused"`` cannot run here; says why.
    """
    if name == "fused":
        raise ValueError(
            "executor 'fused' is not available in this release; use 'auto' or 'modules'"
        )
    return _MODULES


__all__ = ["Executor", "Pass", "PassResult", "choose_executor"]
