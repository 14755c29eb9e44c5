"""The keys of a config.json that are read, and those for which a model is refused.

A family reads the keys of `READ`, and its own from `registry`. No other key can change the result, since the
family's code in the transformers library does not read it either. The exceptions are keys that the library
reads for every model (masks, caches, rotary embeddings): a model with one is refused, unless its value has
no effect. `tests/workers/test_config_keys.py` searches the library's code for more of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.common.quantised.methods import read_quantisation
from workers.common.quantised.scheme import NotUnderstood
from workers.models.errors import UnsupportedError
from workers.models.family import FULL, Family
from workers.models.values import names

READ = names(
    """
    model_type vocab_size hidden_size intermediate_size rms_norm_eps tie_word_embeddings
    num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings rope_theta rope_scaling rope_parameters
    eos_token_id bos_token_id dtype torch_dtype
    """
)

# Keys that the library reads for every model, each with the value that has no effect. ...: there is none.
REFUSED_UNLESS: dict[str, object] = {
    "attention_chunk_size": ...,
    "default_theta": ...,
    "is_causal": True,
    "is_encoder_decoder": False,
    "kv_sharing_modes": ...,
    "layer_types": FULL,  # of each layer
    "partial_rotary_factor": 1,
    "per_layer_config": ...,
    "sliding_window": ...,
    "use_bidirectional_attention": False,
}


def keys_read(family: Family) -> frozenset[str]:
    """The keys of a config that this family reads."""
    # With a rotation for each layer type, the library reads this from the type's own parameters.
    shared = set[str]() if family.rope_by_type else {"original_max_position_embeddings"}
    biases = {"attention_bias": family.qkv_bias, "mlp_bias": family.mlp_bias}
    return (
        READ | shared | family.reads | {family.activation} | {name for name in biases if biases[name] is None}
    )


def settings_read(settings: Mapping[str, object], family: Family) -> dict[str, object]:
    """The settings that the family reads. In all others null counts as absent.

    Raises UnsupportedError if the weights are quantised in a way that is not supported, or another setting
    might change the model.
    """
    try:
        read_quantisation(settings)
    except NotUnderstood as error:
        raise UnsupportedError(f"the weights are quantised: {error}") from None
    read = keys_read(family)
    for name in sorted((settings.keys() & REFUSED_UNLESS.keys()) - read):
        value = settings[name]
        each = value if name == "layer_types" and isinstance(value, list) else [value]
        if any(one is not None and one != REFUSED_UNLESS[name] for one in each):
            raise UnsupportedError(f"{name}: is not supported, got {value!r}")
    return {name: value for name, value in settings.items() if name in read}
