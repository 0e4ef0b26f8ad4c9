"""``generate(raincheck=...)``: enable, disable, the mixin, and the turn around the stock loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from raincheck_hf import checks
from raincheck_hf._compat import check_transformers
from raincheck_hf.binding import bind, previous, unbind
from raincheck_hf.cache import RaincheckCache
from raincheck_hf.completion import completer
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.executor import choose_executor
from raincheck_hf.executor.modules import PassCache
from raincheck_hf.inputs import GRID_KEYS, PIXEL_KEYS, read_input
from raincheck_hf.models import adapter_for
from raincheck_hf.report import RaincheckReport, TurnClock
from raincheck_hf.turn import StepHook, Turn
from raincheck_hf.wrapped import unwrapped

_CONFIG = "_raincheck_config"


@dataclass
class RaincheckOutput(GenerateDecoderOnlyOutput):
    """Stock's output with two keys more to say.

    Attributes:
        cache: The RaincheckCache; hand it to the next turn.
        raincheck: The turn's RaincheckReport.
    """

    raincheck: RaincheckReport | None = None


def enable_raincheck(model: Any, config: RaincheckConfig | None = None) -> Any:
    """Let ``model.generate`` take ``raincheck=``; touches this instance only. Idempotent.

    Args:
        model: A supported vision-language model, or a PEFT or compiled wrapper of one, whose inner
            model is enabled.
        config: What ``raincheck=True`` means on this model; None keeps what it meant before.

    Returns:
        The same object.

    Raises:
        ValueError: The architecture or the transformers release is not supported.
        TypeError: ``config`` is not a RaincheckConfig.
    """
    check_transformers()
    inner = unwrapped(model)
    adapter_for(inner)
    if config is not None and not isinstance(config, RaincheckConfig):
        raise TypeError(f"config must be a RaincheckConfig; got {type(config).__name__}")
    if config is not None or _CONFIG not in inner.__dict__:
        inner.__dict__[_CONFIG] = config or RaincheckConfig()
    if not isinstance(inner, RaincheckGenerationMixin):
        bind(inner, "generate", _generate_bound)
        bind(inner, "forward", _forward_bound)
    _bind_recurrent(inner)
    return model


def disable_raincheck(model: Any) -> Any:
    """Leave the model as it was before ``enable_raincheck``; harmless on any other model.

    Returns:
        The same object.

    Raises:
        RuntimeError: Someone wrapped the model's forward after it was enabled.
    """
    inner = unwrapped(model)
    if _CONFIG not in inner.__dict__:
        return model
    mixers = list(adapter_for(inner).recurrent_modules(inner).values())
    for module in (*mixers, inner):
        unbind(module, "forward")
    unbind(inner, "generate")
    for attribute in (_CONFIG, "raincheck_report"):
        inner.__dict__.pop(attribute, None)
    return model


class RaincheckGenerationMixin:
    """For who prefers to inherit::

    class Mine(RaincheckGenerationMixin, Qwen3VLForConditionalGeneration): ...
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give the class a forward with the stock signature, which stock code reads."""
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            return

        @functools.wraps(super().forward)  # type: ignore[misc]
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return RaincheckGenerationMixin.forward(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As stock; inside ``generate(raincheck=...)``, a raincheck pass."""
        return _forward(super().forward, *args, **kwargs)  # type: ignore[misc]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, and with ``raincheck=``."""
        return _generate(self, super().generate, *args, **kwargs)  # type: ignore[misc]


def _generate_bound(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _generate(model, previous(model, "generate"), *args, **kwargs)


def _forward_bound(model: Any, *args: Any, **kwargs: Any) -> Any:
    return _forward(previous(model, "forward"), *args, **kwargs)


def _recurrent_bound(mixer: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    stock = previous(mixer, "forward")
    cache = kwargs.get("cache")
    if not isinstance(cache, PassCache):
        return stock(hidden_states, *args, **kwargs)
    del kwargs["cache"]
    return cache.run_recurrent(mixer, stock, hidden_states, **kwargs)


def _bind_recurrent(model: Any) -> None:
    for mixer in adapter_for(model).recurrent_modules(model).values():
        bind(mixer, "forward", _recurrent_bound)


def _forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The model's forward: a raincheck pass where a turn is under way, stock everywhere else."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if not isinstance(cache, RaincheckCache):
        return stock(*args, **kwargs)
    if cache.turn is None:
        raise ValueError(
            "a RaincheckCache works inside model.generate(..., raincheck=...) only; "
            "for a plain forward pass use a DynamicCache"
        )
    logits = _pass(cache.turn, kwargs["input_ids"])
    return CausalLMOutputWithPast(logits=logits, cache=cache)


@torch.compiler.disable
def _pass(turn: Turn, ids: torch.Tensor) -> torch.Tensor:
    """Not traced in a compiled model: no two passes have one shape. Compiled layers stay so."""
    return turn.forward(ids)


def _generate(
    model: Any, stock: Callable[..., Any], *args: Any, raincheck: Any = None, **kwargs: Any
) -> Any:
    """``generate`` of an enabled model."""
    config = RaincheckConfig.resolve(raincheck, model.__dict__.get(_CONFIG) or RaincheckConfig())
    if config is None:
        if isinstance(kwargs.get("cache", kwargs.get("past_key_values")), RaincheckCache):
            raise ValueError(
                "this call passes a RaincheckCache without raincheck=; add raincheck=True "
                "(or the config of the earlier turn) to go on with the conversation"
            )
        return stock(*args, **kwargs)
    call = dict(inspect.signature(stock).bind_partial(*args, **kwargs).arguments)
    call.update(call.pop("kwargs", {}))
    with torch.no_grad():
        return _run_turn(model, stock, config, call)


def _run_turn(
    model: Any, stock: Callable[..., Any], config: RaincheckConfig, call: dict[str, Any]
) -> Any:
    """One turn around the stock loop. ``call`` holds every argument of ``generate`` by name."""
    check_transformers()
    checks.check_model(model)
    checks.check_arguments(call)
    mask = call.get("attention_mask")
    ids = checks.check_ids(_one_of(call, "inputs", "input_ids"), mask, model)
    clock = TurnClock(ids.device if model.device.type == "meta" else model.device)
    settings, unused = model._prepare_generation_config(
        call.get("generation_config"), **{k: v for k, v in call.items() if k not in _NOT_SETTINGS}
    )
    checks.check_generation_config(settings)
    model._validate_model_kwargs({k: v for k, v in unused.items() if k not in _TAKEN})  # typos
    executor = choose_executor(config.executor, model)
    passed = checks.take_cache(_one_of(call, "cache", "past_key_values"), model)
    cache = RaincheckCache(model) if passed is None else passed
    _bind_recurrent(model)
    with cache.in_use():
        history = cache.history_for(ids, mask)
        adapter = cache.adapter
        new = read_input(
            ids, mask, call, history, cache.last_token, model.config,
            adapter.merge(model), adapter.frames_apart,
        )  # fmt: skip
        answer_length = settings.max_new_tokens or settings.max_length or 0
        turn = Turn(cache, history, config, executor, new, clock, answer_length)
        cache.turn = turn
        try:
            with completer(model).turn():
                result = stock(**_stock_call(call, ids, cache, turn))
        finally:
            cache.turn = None
            turn.close()
            if cache.report is turn.report:  # the turn began
                model.__dict__["raincheck_report"] = turn.report
        tensor = isinstance(result, torch.Tensor)
        cache.close_turn(int((result if tensor else result.sequences)[0, -1]))
        if tensor and passed is None:
            cache.close()  # nobody can hold a next turn
        elif config.completion == "blocking":
            cache.complete()
        elif config.completion == "background":
            cache.complete_in_background()
    return result if tensor else RaincheckOutput(**result, raincheck=turn.report)


def _stock_call(
    call: dict[str, Any], ids: torch.Tensor, cache: RaincheckCache, turn: Turn
) -> dict[str, Any]:
    """The arguments of the stock loop: no pixels, our cache, our hook in copies of the lists."""
    kept = {key: value for key, value in call.items() if key not in _TAKEN}
    total = ids.shape[1] if turn.whole else cache.get_seq_length() + ids.shape[1]
    return {
        **kept,
        "input_ids": ids,
        # Stock slices off what is cached when the mask is as long as the ids.
        "attention_mask": ids.new_ones(1, total),
        # The cache keeps positions; these keep stock from deriving its own onto the model.
        "position_ids": torch.arange(ids.shape[1], device=ids.device)[None],
        "cache": cache,
        "logits_processor": LogitsProcessorList(
            [*(call.get("logits_processor") or ()), StepHook(turn)]
        ),
        "stopping_criteria": StoppingCriteriaList(call.get("stopping_criteria") or ()),
    }


def _one_of(call: dict[str, Any], *names: str) -> Any:
    """The value given under one of several names.

    Raises:
        ValueError: Given under more than one.
    """
    given = [name for name in names if call.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"pass either {' or '.join(given)}, not both")
    return call[given[0]] if given else None


_NOT_SETTINGS = frozenset(inspect.signature(GenerationMixin.generate).parameters) | {
    "tokenizer", "assistant_tokenizer",
}  # fmt: skip
_TAKEN = frozenset(
    {
        "inputs", "input_ids", "attention_mask", "position_ids", "mm_token_type_ids",
        "cache", "past_key_values", *PIXEL_KEYS.values(), *GRID_KEYS.values(),
    }
)  # fmt: skip
