"""Which modules a config says are quantised, and how."""

from __future__ import annotations

from typing import Any

import pytest

from workers.common.patterns import Patience
from workers.common.quantised.methods import is_quantised, read_quantisation
from workers.common.quantised.scheme import Layout, Names, NotUnderstood, Scheme


def group(targets: list[str], bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    return {"targets": targets, "weights": weights}


def said(**settings: Any) -> dict[str, Any]:
    return {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"} | settings
    }


def test_the_name_of_a_module_counts_more_than_a_pattern_and_that_more_than_its_kind() -> None:
    groups = {
        "kind": group(["Linear"], 4),
        "pattern": group(["re:.*down_proj"], 8) | {"format": "int-quantized"},
        "name": group(["model.layers.3.mlp.down_proj", "model.layers.4.mlp.up_proj"], 4),
    }
    read = read_quantisation(said(config_groups=groups, ignore=["lm_head", "re:.*layers.4[.].*"]))
    assert read is not None
    four, eight = Scheme(Layout.PACKED, 4, 128), Scheme(Layout.BYTES, 8, 128)
    for module, kind, scheme in (
        ("model.layers.3.mlp.up_proj", "Linear", four),
        ("model.layers.5.mlp.down_proj", "Linear", eight),
        ("model.layers.3.mlp.down_proj", "Linear", four),
        ("model.layers.4.mlp.up_proj", "Linear", None),
        ("model.layers.40.mlp.up_proj", "Linear", four),
        ("lm_head", "Linear", None),
        ("model.embed_tokens", "Embedding", None),
    ):
        assert read.scheme(module, kind) == scheme, module


def test_patterns_take_bounded_time() -> None:
    names = Names.read(["re:" + "(?:a|aa)" * 50 + "$b"], "ignore", Patience(NotUnderstood, 0.2))
    with pytest.raises(NotUnderstood, match="the patterns take too long to match"):
        names.have("a" * 90, "Linear")


def test_what_has_no_effect_is_told() -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    groups = {"one": group(["Linear"], 8) | {"input_activations": inputs}}
    read = read_quantisation(said(config_groups=groups, kv_cache_scheme={"num_bits": 8, "type": "float"}))
    assert read is not None
    assert [note.split(":")[0] for note in read.notes] == ["input_activations", "kv_cache_scheme"]


def test_a_text_part_may_say_it() -> None:
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}
    for settings in (awq, {"text_config": awq}, {"quantization_config": None, "text_config": awq}):
        read = read_quantisation(settings)
        assert read is not None and read.method == "awq" and is_quantised(settings)
        assert read.scheme("anything", "Linear") == Scheme(Layout.AWQ, 4, 64, has_zeros=True)
    assert read_quantisation({"text_config": 7}) is None and not is_quantised({"quantization_config": {}})
