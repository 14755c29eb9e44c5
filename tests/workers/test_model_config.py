"""Reading config.json: both spellings, what is derived, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kernels.rope import rope_frequencies
from workers.models.config import ModelConfig
from workers.models.errors import ModelError, UnsupportedError
from workers.models.family import Family
from workers.models.registry import FAMILIES
from workers.models.values import warn_outside

# As in the checkpoint of Qwen3-0.6B, spelled as by transformers 4.
OLD: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(**changes: Any) -> ModelConfig:
    """The config of OLD with some settings changed; `...` removes one."""
    return ModelConfig.from_settings({k: v for k, v in {**OLD, **changes}.items() if v is not ...})


def windows_of(config: ModelConfig) -> list[int | None]:
    """The window of each layer."""
    return [layer.window for layer in config.layers]


def test_new_spelling_is_the_same_model() -> None:
    new = read(
        rope_theta=...,
        rope_scaling=...,
        torch_dtype=...,
        dtype="bfloat16",
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
        layer_types=["full_attention"] * 28,
    )
    assert new == read()
    assert read(torch_dtype="torch.float32").dtype == "float32"


def test_proportional_rope_turns_a_share_of_the_pairs_of_whole_heads() -> None:
    """So tables are as wide as heads, and their last angles zero."""
    config = read(rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25})
    assert config.rotary_dim == 128 and config.layers[0].rope is not None
    assert rope_frequencies(config.layers[0].rope, 128)[0].count_nonzero() == 16


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 9}, {None}),
        ({"use_sliding_window": True, "sliding_window": None}, {None}),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, {9}),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 28}, {None}),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 28}, {9}),
    ],
)
def test_windows(changes: dict[str, Any], windows: set[int | None]) -> None:
    assert set(windows_of(read(**changes))) == windows


@pytest.mark.parametrize(("eos", "ids"), [(5, (5,)), ([5, 6, 5], (5, 6)), (None, (151645,))])
def test_generation_config_replaces_the_end_tokens(tmp_path: Path, eos: object, ids: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize("outside", [OLD["vocab_size"], 1 << 32, -1])
def test_token_ids_outside_the_vocabulary_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, outside: int
) -> None:
    settings = {**OLD, "eos_token_id": outside, "bos_token_id": outside}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    warn_outside.cache_clear()
    config = ModelConfig.from_directory(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)
    warning = f"eos_token_id {outside} is outside the vocabulary of {OLD['vocab_size']} tokens and is ignored"
    assert warning in caplog.text and warning.replace("eos", "bos") in caplog.text
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [outside, 5]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ...}, "model_type: must be the name of a model family, got None"),
        ({"vocab_size": None}, "vocab_size: must be a positive integer, got nothing"),
        ({"hidden_size": 0}, "hidden_size: must be a positive integer, got 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers: must be a positive integer, got '4'"),
        ({"num_key_value_heads": 3}, "num_attention_heads: must be a multiple of num_key_value_heads"),
        ({"num_attention_heads": True}, "num_attention_heads: must be a positive integer, got True"),
        ({"head_dim": 33}, "head_dim: must be even, got 33"),
        ({"head_dim": None, "hidden_size": 1000}, "hidden_size: must be a multiple of num_attention_heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: must be a positive number, got -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({"torch_dtype": "int8"}, "dtype: must be one of float32, bfloat16, float16, got 'int8'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor: must be a positive number, got nothing"),
        ({"rope_scaling": [1]}, "rope_scaling: must be an object"),
        ({"rope_parameters": {"full_attention": {}}}, "must not be by layer type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: must be 1"),
        ({"layer_types": ["full_attention"]}, "layer_types: must have 28 entries, got 1"),
        (
            {"layer_types": ["linear_attention"] * 28},
            "layer_types: each must be one of full_attention, sliding",
        ),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": -1}, "max_window_layers"),
        (
            {"use_sliding_window": False, "sliding_window": 4, "layer_types": ["sliding_attention"] * 28},
            "layer_types: sliding_attention needs a sliding_window that is used",
        ),
    ],
)
def test_refusals_name_the_setting(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**changes)


def test_infinity_may_be_written_as_python_writes_it(tmp_path: Path) -> None:
    """As in the published configs of Mamba 2 and Nemotron-H."""
    mamba2 = {"model_type": "mamba2", "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2}
    limited = {**mamba2, "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(limited))
    assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_settings(mamba2)
    for number, said in (("NaN", "NaN is not a number"), ("Infinity", "rms_norm_eps: must be from")):
        (tmp_path / "config.json").write_text(json.dumps(OLD).replace("1e-06", number))
        with pytest.raises(ModelError, match=said):
            ModelConfig.from_directory(tmp_path)


def test_an_option_of_deepseek_v2_that_the_library_ignores_is_refused() -> None:
    settings = {"model_type": "deepseek_v2", "num_experts_per_tok": 2, "norm_topk_prob": True}
    with pytest.raises(UnsupportedError, match="norm_topk_prob: must be false"):
        ModelConfig.from_settings(settings)


# Its window counts without a word about it.
MISTRAL = {key: value for key, value in OLD.items() if "window" not in key} | {
    "model_type": "mistral",
    "sliding_window": 4096,
}


def test_a_new_family_is_never_silently_without_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in the registry makes a family known, not its window."""
    monkeypatch.setitem(FAMILIES, "mistral", Family())
    with pytest.raises(ModelError, match="sliding_window: is not supported"):
        ModelConfig.from_settings(MISTRAL)
    with pytest.raises(ModelError, match="sliding_window"):
        ModelConfig.from_settings(MISTRAL | {"layer_types": None})
    for used in (False, True):
        with pytest.raises(ModelError, match="is not supported"):
            ModelConfig.from_settings(MISTRAL | {"use_sliding_window": used, "max_window_layers": 28})
    whole = ModelConfig.from_settings(MISTRAL | {"sliding_window": None})
    assert windows_of(whole) == [None] * 28


def test_what_qwen3_ignores_is_ignored() -> None:
    assert set(windows_of(read(use_sliding_window=..., sliding_window=9))) == {None}


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModel": "x.Y"}},
        {"is_llama_config": True},
        {"rope_interleaved": False},
        {"final_logit_softcapping": 30.0},
        {"embedding_multiplier": 12},
        {"logits_scaling": 8.0},
        {"no_rope_layers": [0] * 28},
        {"num_experts": 128},
        {"mlp_bias": True},
        {"pretraining_tp": 2},
        {"is_decoder": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "interleaved": True}},
    ],
)
def test_a_key_that_the_family_does_not_read_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(**changes) == read()
    (tmp_path / "config.json").write_text(json.dumps(OLD | changes))
    assert ModelConfig.from_settings(AutoConfig.from_pretrained(tmp_path).to_dict()) == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder: is not supported, got True"),
        ({"attention_chunk_size": 8}, "attention_chunk_size: is not supported, got 8"),
        ({"is_causal": False}, "is_causal: is not supported, got False"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: is not supported"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config: is not supported"),
    ],
)
def test_a_key_that_the_library_reads_for_every_model_refuses_it(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read(**changes)


def test_layers_that_are_all_full_are_those_of_llama() -> None:
    llama = {"model_type": "llama", "num_hidden_layers": 2}
    full = ModelConfig.from_settings(llama | {"layer_types": ["full_attention"] * 2})
    assert full == ModelConfig.from_settings(llama)
    with pytest.raises(UnsupportedError, match="layer_types"):
        ModelConfig.from_settings(llama | {"layer_types": ["full_attention", "sliding_attention"]})


def test_refusals_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        ModelConfig.from_directory(tmp_path)
    file = tmp_path / "config.json"
    for content, message in (
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "model_type"),
    ):
        file.write_text(content)
        with pytest.raises(ModelError, match=rf"config\.json: {message}"):
            ModelConfig.from_directory(tmp_path)
