"""RaincheckConfig: what it takes, what it says about what it does not take."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
import torch

from raincheck_hf import RaincheckConfig, register_selector
from raincheck_hf.selection import registry

DEFAULTS = {
    "retention": 0.3,
    "selector": "mmtok",
    "retention_scope": "prompt",
    "defer": "decode",
    "chunk_size": 31,
    "guard_tokens": 16,
    "order": "source",
    "completion": "background",
    "completion_chunk_size": 256,
    "executor": "auto",
    "fuse": True,
    "seed": 0,
}

CHOICES = {
    "retention_scope": ("prompt", "item", "frame"),
    "defer": ("decode", "post_answer", "never"),
    "order": ("source", "relevance"),
    "completion": ("background", "blocking", "lazy"),
    "executor": ("auto", "modules", "fused"),
}


def own_scores(context):
    return torch.zeros(context.n)


def test_the_defaults_are_those_of_the_contract():
    assert RaincheckConfig().to_dict() == DEFAULTS


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("retention", 0, "(0, 1]"),
        ("retention", 0.0, "(0, 1]"),
        ("retention", -0.1, "(0, 1]"),
        ("retention", 1.2, "(0, 1]"),
        ("retention", 30, "(0, 1]"),
        ("retention", float("nan"), "(0, 1]"),
        ("retention", float("inf"), "(0, 1]"),
        ("chunk_size", 0, "1 to 511"),
        ("chunk_size", -3, "1 to 511"),
        ("chunk_size", 512, "1 to 511"),
        ("guard_tokens", -1, "0 or more"),
        ("completion_chunk_size", 0, "1 or more"),
        ("seed", -1, "0 or more"),
    ],
)
def test_a_number_out_of_range_is_named_with_value_and_range(field, value, limits):
    with pytest.raises(ValueError) as error:
        RaincheckConfig(**{field: value})
    message = str(error.value)
    assert field in message
    assert repr(value) in message
    assert limits in message


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("value", ["sometimes", "", None, 1, ["source"]])
def test_another_choice_is_named_with_those_there_are(field, value):
    with pytest.raises((ValueError, TypeError)) as error:
        RaincheckConfig(**{field: value})
    message = str(error.value)
    assert field in message
    assert repr(value) in message
    assert all(choice in message for choice in CHOICES[field])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("retention", "0.3"),
        ("retention", None),
        ("retention", True),
        ("retention", torch.tensor(0.3)),
        ("selector", None),
        ("selector", 3),
        ("chunk_size", 7.5),
        ("chunk_size", "7"),
        ("chunk_size", True),
        ("guard_tokens", 1.0),
        ("completion_chunk_size", None),
        ("seed", "0"),
        ("fuse", 1),
        ("fuse", "yes"),
        ("fuse", None),
    ],
)
def test_a_wrong_type_is_named_with_the_value(field, value):
    with pytest.raises(ValueError) as error:
        RaincheckConfig(**{field: value})
    assert field in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"retention": 1},
        {"retention": 1.0},
        {"retention": 1e-9},
        {"chunk_size": 1},
        {"chunk_size": 511},
        {"guard_tokens": 0},
        {"guard_tokens": 10**9},
        {"completion_chunk_size": 1},
        {"seed": 2**40},
        {"fuse": False},
        *({field: choice} for field, choices in CHOICES.items() for choice in choices),
    ],
)
def test_values_at_the_limits_are_taken(fields):
    config = RaincheckConfig(**fields)
    assert RaincheckConfig.from_dict(config.to_dict()) == config
    assert config.to_dict() == {**DEFAULTS, **fields}


def test_an_unknown_selector_lists_the_known_ones():
    with pytest.raises(ValueError, match="'nope'") as error:
        RaincheckConfig(selector="nope")
    assert all(name in str(error.value) for name in ("mmtok", "uniform", "random"))


def test_an_unknown_field_lists_the_known_ones():
    with pytest.raises(ValueError, match="'retain'") as error:
        RaincheckConfig.from_dict({"retain": 0.3})
    assert all(field in str(error.value) for field in DEFAULTS)


def test_it_is_frozen():
    config = RaincheckConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.retention = 0.5
    assert config.retention == 0.3


def test_a_changed_copy_is_validated_and_leaves_the_original():
    config = RaincheckConfig(chunk_size=7)
    assert config.replace(retention=0.5) == RaincheckConfig(chunk_size=7, retention=0.5)
    assert config == RaincheckConfig(chunk_size=7)
    with pytest.raises(ValueError, match="chunk_size"):
        config.replace(chunk_size=0)
    with pytest.raises(ValueError, match="chunk_size"):
        dataclasses.replace(config, chunk_size=0)


def test_json_round_trip(tmp_path):
    config = RaincheckConfig(retention=0.2, selector="uniform", fuse=False, seed=4)
    path = tmp_path / "raincheck.json"
    config.to_json_file(path)
    assert json.loads(path.read_text()) == config.to_dict()
    assert RaincheckConfig.from_json_file(str(path)) == config


def test_missing_fields_take_their_defaults(tmp_path):
    path = tmp_path / "raincheck.json"
    path.write_text('{"chunk_size": 7}')
    assert RaincheckConfig.from_json_file(path) == RaincheckConfig(chunk_size=7)


def test_a_bad_file_is_an_error_that_names_the_field(tmp_path):
    path = tmp_path / "raincheck.json"
    path.write_text('{"chunk_size": 0}')
    with pytest.raises(ValueError, match="chunk_size"):
        RaincheckConfig.from_json_file(path)


def test_a_callable_selector_works_but_cannot_be_saved(tmp_path):
    config = RaincheckConfig(selector=own_scores)
    assert config.selector is own_scores
    assert config.replace(retention=0.5).selector is own_scores
    with pytest.raises(ValueError, match="register_selector"):
        config.to_dict()


def test_a_config_that_cannot_be_saved_leaves_the_file_alone(tmp_path):
    path = tmp_path / "raincheck.json"
    RaincheckConfig().to_json_file(path)
    before = path.read_text()
    with pytest.raises(ValueError, match="register_selector"):
        RaincheckConfig(selector=own_scores).to_json_file(path)
    assert path.read_text() == before


def test_a_registered_selector_is_known_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_SELECTORS", dict(registry._SELECTORS))
    register_selector("test_config_scores")(own_scores)
    assert RaincheckConfig(selector="test_config_scores").to_dict()["selector"] == (
        "test_config_scores"
    )
    with pytest.raises(ValueError, match="test_config_scores"):
        RaincheckConfig(selector="nope")


def test_configs_compare_hash_copy_and_pickle():
    config = RaincheckConfig(retention=0.2)
    assert config == RaincheckConfig(retention=0.2) != RaincheckConfig()
    assert len({config, RaincheckConfig(retention=0.2)}) == 1
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("choice", [None, False])
def test_none_and_false_mean_stock(choice):
    assert RaincheckConfig.resolve(choice, RaincheckConfig()) is None


def test_true_means_the_default_and_a_dict_changes_it():
    default = RaincheckConfig(retention=0.2, chunk_size=7)
    assert RaincheckConfig.resolve(True, default) == default
    assert RaincheckConfig.resolve({"chunk_size": 3}, default) == default.replace(chunk_size=3)
    assert RaincheckConfig.resolve({}, default) == default
    other = RaincheckConfig(retention=0.9)
    assert RaincheckConfig.resolve(other, default) == other


@pytest.mark.parametrize("choice", [1, 0, 0.3, "mmtok", [], RaincheckConfig])
def test_anything_else_is_refused(choice):
    with pytest.raises(TypeError, match=r"raincheck=.*RaincheckConfig"):
        RaincheckConfig.resolve(choice, RaincheckConfig())


def test_a_dict_with_an_unknown_field_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'chunks'.*chunk_size"):
        RaincheckConfig.resolve({"chunks": 3}, RaincheckConfig())


def test_the_module_loads_no_model_code():
    code = (
        "import sys, importlib.util as u; "
        "s = u.spec_from_file_location('config', sys.argv[1]); m = u.module_from_spec(s); "
        "sys.modules['config'] = m; s.loader.exec_module(m); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    path = sys.modules[RaincheckConfig.__module__].__file__
    subprocess.run([sys.executable, "-c", code, path], check=True)
