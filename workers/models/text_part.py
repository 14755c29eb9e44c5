"""Translates the text part of a multimodal checkpoint to a checkpoint of a text model.

The other parts are not loaded. Without images or sounds, the multimodal models of `WRAPPERS` are equivalent
to a text model: the three positions of a token of Qwen-VL (M-RoPE) are equal then, and so are its rotations.
`.ci/types_page.py` compares each with the library's own model, as does `tests/workers/test_text_part.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from workers.models.errors import ModelError
from workers.models.values import names

_Value = TypeVar("_Value")

# Multimodal models whose config may lack the type of their text part, by that type.
_WRAPPERS_OF: dict[str, str] = {
    "aria_text": "aria",
    "qwen2": (
        "audioflamingo3 got_ocr2 internvl llava_onevision musicflamingo ovis2 pp_chart2table "
        "qwen2_audio video_llama_3"
    ),
    "llama": (
        "deepseek_vl deepseek_vl_hybrid glmasr idefics3 llava llava_next llava_next_video smolvlm "
        "video_llava vipllava voxtral"
    ),
    "exaone4": "exaone4_5",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
    "granite": "granite_speech granite_speech_plus",
    "hyperclovax": "hyperclovax_vision_v2",
    "mistral": "idefics2 mistral3",
    "lfm2": "lfm2_vl",
    "lfm3": "lfm3_vl",
    "qwen3": "lighton_ocr moss_transcribe_diarize qwen3_asr",
    "llama4_text": "llama4",
    "qwen3_5_text": "minicpm_ocr minicpmv4_6 minicpmv4_7 qwen3_5",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
WRAPPERS = {wrapper: text for text, wrappers in _WRAPPERS_OF.items() for wrapper in wrappers.split()}
"""The `model_type` of multimodal models, and that of their text part if this does not say it."""

# Types that are equivalent to another type, apart from images, with the settings to replace.
_SAME: dict[str, dict[str, object]] = {
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_vl_text": {"model_type": "qwen3"},
}
# Their first checkpoints have the settings of the text beside those of the other parts.
_FLAT = ("qwen2_5_vl", "qwen2_vl")
_TEXT = "text_config"
# Settings outside of the text part.
_SHARED = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")

RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("language_model.", "model."),  # of a base model, and the next one
    ("text_model.", "model."),
)
"""Prefixes of tensors of the text part, and those in a checkpoint of a text model. The first match counts."""

_OTHER_PARTS = names(
    """
    aligner. audio_tower. connector. embed_audio. embed_vision. encoder. high_res_vision_ image_newline
    image_tower. merger. mlp1. mm_projector. multi_modal_projector. projector. video_tower. vision_embedder.
    vision_encoder. vision_model. vision_projection. vision_projector. vision_tower. visual.
    visual_embeddings_table.
    """
)
LEFT_OUT = tuple(f"{prefix}{part}" for prefix in ("model.", "") for part in sorted(_OTHER_PARTS))
"""The prefixes of the tensors of the other parts."""


def text_part(settings: Mapping[str, object]) -> Mapping[str, object]:
    """The settings of the text part of a multimodal model, else all settings. Raises ModelError."""
    wrapper = str(settings.get("model_type"))
    if wrapper not in WRAPPERS:
        return _as_same(settings, wrapper)
    text = settings.get(_TEXT)
    if text is None and wrapper in _FLAT:
        text = {
            name: value for name, value in settings.items() if name not in ("model_type", "vision_config")
        }
    if (
        text is None and wrapper == "gemma3"
    ):  # all settings of its text part have the defaults of a text model
        text = {}
    if not isinstance(text, Mapping):
        raise ModelError(f"{_TEXT}: must be an object, got {text!r}")
    outside = {name: settings[name] for name in _SHARED if settings.get(name) is not None}
    found = {"model_type": WRAPPERS[wrapper]} | outside | dict(text)
    if "tie_word_embeddings" in outside:  # beside the head; older versions of the library use the text part's
        found["tie_word_embeddings"] = (
            outside["tie_word_embeddings"] or text.get("tie_word_embeddings") or False
        )
    return _as_same(found, str(found["model_type"]))


def _as_same(settings: Mapping[str, object], model_type: str) -> Mapping[str, object]:
    """The settings of the equivalent type, if there is one."""
    if model_type not in _SAME:
        return settings
    return {
        name: _without_sections(value) if name.startswith("rope_") else value
        for name, value in {**settings, **_SAME[model_type]}.items()
    }


def _without_sections(rope: object) -> object:
    """The rotary parameters without the sections that only matter for images."""
    if not isinstance(rope, Mapping):
        return rope
    plain = {name: value for name, value in rope.items() if not str(name).startswith("mrope_")}
    return {name: "default" if value == "mrope" else value for name, value in plain.items()}


def without_other_parts(tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """The tensors of the text part of a multimodal checkpoint."""
    return {name: value for name, value in tensors.items() if not name.startswith(LEFT_OUT)}


def of_text_model(tensors: Iterable[tuple[str, _Value]]) -> Iterable[tuple[str, _Value]]:
    """The tensors of the text part by their names in a checkpoint of a text model."""
    for name, value in tensors:
        before, after = next((pair for pair in RENAMED if name.startswith(pair[0])), ("", ""))
        yield after + name.removeprefix(before), value
