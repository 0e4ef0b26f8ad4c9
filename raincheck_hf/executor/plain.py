"""Modules that somebody replaced, hooked or wrapped, so that their own forward must be called."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import nn


def unplain(
    root: nn.Module, called: str, allowed: tuple[type, ...], bound: Collection[int] = ()
) -> Iterator[str]:
    """What stands in the way of computing with a module's weights alone, one sentence each.

    Args:
        root: The module.
        called: Its name, for the sentences.
        allowed: Weighted modules of torch that are understood; others of ``torch.nn`` pass.
        bound: ``id`` of modules whose forward may be bound on the instance.
    """
    own = type(root).__module__
    for path, module in root.named_modules():
        name = f"{called}.{path}" if path else called
        kind = type(module)
        if module._forward_hooks or module._forward_pre_hooks:
            yield f"{name} has forward hooks"
        if "forward" in module.__dict__ and id(module) not in bound:
            yield f"{name} has a forward of its own (a hook of accelerate, for example)"
        known = kind in allowed or kind.__module__ in (own, "transformers.activations")
        if not known and not kind.__module__.startswith("torch.nn.modules"):
            yield f"{name} is a {kind.__name__}, not a plain linear layer"
        for attribute, parameter in module._parameters.items():
            if parameter is not None and type(parameter) is not nn.Parameter:
                yield f"{name}.{attribute} is a {type(parameter).__name__}"


class Census:
    """Remembers modules and where their weights lie, to tell cheaply that nothing was replaced."""

    def __init__(self, *roots: nn.Module, held: Iterable[tuple[nn.Module, str]] = ()) -> None:
        """Look at modules and all below them.

        Args:
            *roots: The modules.
            held: (owner, name) of what must stay their place. The owners themselves are not held.
        """
        modules = [module for root in roots for module in root.modules()]
        self._children = [
            (module._modules, name, child)
            for module in modules
            for name, child in module._modules.items()
        ]
        self._children += [(owner._modules, name, owner._modules[name]) for owner, name in held]
        self._parameters = [
            (module._parameters, name, parameter, 0 if parameter is None else parameter.data_ptr())
            for module in modules
            for name, parameter in module._parameters.items()
        ]
        self._hooks = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._forwards = [(module.__dict__, module.__dict__.get("forward")) for module in modules]

    def holds(self) -> bool:
        """Whether all is as it was, without hooks."""
        return (
            all(owner.get(name) is child for owner, name, child in self._children)
            and all(
                owner.get(name) is parameter
                and (parameter is None or parameter.data_ptr() == address)
                for owner, name, parameter, address in self._parameters
            )
            and not any(self._hooks)
            and all(own.get("forward") is forward for own, forward in self._forwards)
        )
