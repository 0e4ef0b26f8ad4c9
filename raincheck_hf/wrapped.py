"""What people put around a model: what is looked through, and what cannot work.

Nothing here imports the libraries that wrap; they are known by what they leave on a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor

_WHOLE_COPY = (
    "Load a whole copy in each process, or spread one over the GPUs of one process with "
    'device_map="auto"; or leave out raincheck= to run stock generate'
)
_WITHOUT_GENERATE = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")


def unwrapped(model: Any) -> Any:
    """The model whose ``generate`` runs when the wrapper's is called; ``model`` if there is none.

    PEFT models and what ``torch.compile(model)`` returns are looked through.

    Raises:
        ValueError: The wrapper has no ``generate``, or shards the model; says what to do instead.
    """
    while True:
        kind = type(model).__name__
        if hasattr(type(model), "get_base_model"):  # PEFT
            model = model.get_base_model()
        elif "_orig_mod" in getattr(model, "_modules", {}):  # torch.compile
            model = model._orig_mod
        elif kind == "FullyShardedDataParallel":
            raise _shards("FSDP")
        elif kind in _WITHOUT_GENERATE:
            raise ValueError(
                f"{kind} has no generate; hand over the model inside it: "
                "accelerator.unwrap_model(model), or model.module"
            )
        else:
            return model


def check_wrapping(model: Any) -> None:
    """Refuse what is around or inside a model and cannot work with raincheck.

    Args:
        model: The model itself, not a wrapper.

    Raises:
        ValueError: Names what it is, why, and what to do.
    """
    sharded = _sharded_by(model)
    if sharded is not None:
        raise _shards(sharded)
    adapter = next(_unusable_adapters(model), None)
    if adapter is not None:
        what, why, instead = adapter
        raise ValueError(
            f"raincheck= does not work with {what}: {why}. "
            f"{instead}, or leave out raincheck= to run stock generate"
        )


def _shards(what: str) -> ValueError:
    return ValueError(
        f"raincheck= does not run on a model sharded by {what}: all processes would have to run "
        f"the same passes at the same time, and conversations do not. {_WHOLE_COPY}"
    )


def _sharded_by(model: Any) -> str | None:
    first = next(model.parameters(), None)
    if hasattr(first, "ds_id"):
        return "DeepSpeed ZeRO-3"
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return "tensor parallelism"
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if getattr(model, "_is_fsdp_managed_module", False) or "FSDPModule" in kinds:
        return "FSDP"
    return "a device mesh (DTensor)" if isinstance(first, DTensor) else None


def _unusable_adapters(model: Any) -> Iterator[tuple[str, str, str]]:
    """What of PEFT cannot work: its name, the reason, and what to do instead."""
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    owner = getattr(prepare, "__self__", model)
    if owner is not model and getattr(owner.active_peft_config, "is_prompt_learning", False):
        yield (
            f"{owner.active_peft_config.peft_type.value} (a PEFT prompt-learning method)",
            "its virtual tokens stand in front of the prompt, where raincheck has its own cache",
            "Use a method that adapts layers, such as LoRA",
        )
    configs = model.__dict__.get("peft_config") or {}
    if configs and _drop_hooks(model, "_adapter_names_pre_forward_hook"):
        yield (
            "adapter_names=",
            "tokens restored after the answer would go through another adapter",
            "Call set_adapter() before generate",
        )
    for config in configs.values():
        if getattr(config, "alora_invocation_tokens", None):
            _drop_hooks(model, "_alora_offsets_pre_forward_hook")
            yield (
                "an activated LoRA (aLoRA)",
                "it counts tokens from the end of the prompt, and passes hold parts of it",
                "Merge it or use plain LoRA",
            )
        if getattr(config.peft_type, "value", "") == "XLORA":
            yield (
                "X-LoRA",
                "it weighs adapters by a forward pass over the whole prompt",
                "Use plain LoRA",
            )


def _drop_hooks(model: Any, name: str) -> bool:
    """Remove PEFT's hooks for one call; whether there were any.

    PEFT itself forgets them when ``generate`` raises, and later calls would go through them.
    """
    found = [
        (module, key)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if getattr(getattr(hook, "func", hook), "__name__", "") == name
    ]
    for module, key in found:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    return bool(found)
