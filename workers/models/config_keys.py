"""The keys that a config.json may have. Any other key is refused, since it might change the model.

A key is allowed if `config` reads it, if it has no effect on a forward, or if it has the one value without an
effect. The keys that only some families read are in `registry`.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.models.errors import UnsupportedError
from workers.models.registry import Family
from workers.models.values import names

READ = names(
    """
    model_type vocab_size hidden_size intermediate_size rms_norm_eps tie_word_embeddings
    num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings rope_theta rope_scaling rope_parameters
    eos_token_id bos_token_id dtype torch_dtype
    """
)
ROPE_READ = names(
    """
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor
    beta_fast beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor
    short_factor long_factor
    """
)

# Without effect at any value: the origin of the file, training, the results of Python calls, and the settings
# of generate().
WITHOUT_EFFECT = names(
    """
    _name_or_path architectures transformers_version unsloth_fixed unsloth_version tokenizer_class
    model_max_length task_specific_params finetuning_task problem_type id2label label2id num_labels prefix
    initializer_range attention_dropout use_cache return_dict output_hidden_states output_attentions
    torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
    _attn_implementation attn_implementation _attn_implementation_autoset
    pad_token_id sep_token_id unk_token_id decoder_start_token_id
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens
    """
)

# Allowed at these values only: at any other they ask for something that is not supported.
HARMLESS_AT: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "pretraining_tp": 1,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "use_mrope": False,
    "use_bidirectional_attention": False,
}

# This key says that weights are quantised, unless its value is empty.
QUANTIZATION = "quantization_config"
QUANTIZED = f"{QUANTIZATION}: quantised weights are not supported, only float32, bfloat16 and float16"


def check_keys(settings: Mapping[str, object], family: Family) -> None:
    """Raises UnsupportedError for a key that might change the model. null counts as absent."""
    fixed = {"attention_bias": family.qkv_bias, "mlp_bias": family.mlp_bias}
    read = READ | family.reads | {family.activation} | {name for name in fixed if fixed[name] is None}
    for name in sorted(settings.keys() - read - WITHOUT_EFFECT - family.ignores):
        value = settings[name]
        if name == QUANTIZATION:
            if value:
                raise UnsupportedError(QUANTIZED)
        elif value is not None and (name not in HARMLESS_AT or value != HARMLESS_AT[name]):
            raise UnsupportedError(f"{name}: is not supported, got {value!r}")


def check_rope_keys(parameters: Mapping[str, object]) -> None:
    """Raises UnsupportedError for an unknown parameter of a rotary embedding. null counts as absent."""
    for name in sorted(parameters.keys() - ROPE_READ):
        if parameters[name] is not None:
            raise UnsupportedError(f"rope_parameters: {name} is not supported, got {parameters[name]!r}")
