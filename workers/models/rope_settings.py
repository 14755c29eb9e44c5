"""Reads the rotary embeddings of a config.json, in the spelling of transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kernels.rope import RopeSpec
from workers.models.errors import ModelError, UnsupportedError
from workers.models.family import FULL, SLIDING, Family
from workers.models.values import boolean, integer, number, optional_number, positive_numbers

# The names of some types in transformers 4.
_OLD_TYPES = {"su": "longrope"}


def read_ropes(settings: Mapping[str, object], family: Family) -> dict[str, RopeSpec]:
    """The rotary embedding of each type of layer.

    Raises:
        ModelError: A setting is invalid; the message names it.
        UnsupportedError: A setting is not supported.
    """
    # In transformers the old spelling takes precedence if a config has both.
    scaling = _object(settings.get("rope_scaling"), "rope_scaling")
    by_type = _object(settings.get("rope_parameters"), "rope_parameters")
    if not family.rope_by_type:
        parameters = scaling or by_type
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise UnsupportedError("rope_parameters: must not be by layer type for this model_type")
        rope = _read(settings, parameters, "rope_theta")
        return {FULL: rope, SLIDING: rope}
    # In the old spelling only the full layers are scaled, and the sliding ones have their own base. The
    # library merges it into the new one, which has a `rope_type`: an older `type` is ignored.
    if by_type.keys() - {FULL, SLIDING}:
        raise UnsupportedError(f"rope_parameters: must be by layer type, got {sorted(by_type)}")
    full = _object(by_type.get(FULL), f"rope_parameters.{FULL}") or {"rope_type": "default"}
    sliding = _object(by_type.get(SLIDING), f"rope_parameters.{SLIDING}")
    # The library reads `truncate` beside the types.
    return {
        FULL: _read(settings, {**full, **scaling, "truncate": True}, "rope_theta"),
        SLIDING: _read(settings, {**sliding, "truncate": True}, "rope_local_base_freq"),
    }


def rotary_dim(settings: Mapping[str, object], family: Family, head_dim: int) -> int:
    """The number of rotated elements of a head. Raises ModelError, or UnsupportedError."""
    parameters = settings.get("rope_scaling") or settings.get("rope_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    if _type_of(parameters) == "proportional":
        return head_dim  # the other pairs are rotated by 0
    inner = parameters.get("partial_rotary_factor")
    partial = settings.get("partial_rotary_factor") if inner is None else inner
    if partial in (None, 1, 1.0):
        return head_dim
    if "partial_rotary_factor" not in family.reads:
        raise UnsupportedError(f"partial_rotary_factor: must be 1, got {partial!r}")
    share = number({"partial_rotary_factor": partial}, "partial_rotary_factor")
    rotated = int(head_dim * share)
    if share > 1 or rotated < 2 or rotated % 2:
        raise ModelError(
            f"partial_rotary_factor: must make the number of rotated elements even and from 2 to {head_dim},"
            f" got {partial!r}"
        )
    return rotated


def max_seq_len(settings: Mapping[str, object], ropes: Iterable[RopeSpec | None]) -> int:
    """The longest sequence that can be served with these rotations, in tokens. Raises ModelError."""
    longest = integer(settings, "max_position_embeddings")
    limits = (rope.max_position_embeddings for rope in ropes if rope is not None)
    return min([longest, *filter(None, limits)])


def longest_text(settings: Mapping[str, object], default: int) -> int:
    """The longest text that a config names, in tokens, even if a shorter limit is served."""
    text = settings.get("text_config")
    inner = text if isinstance(text, Mapping) else settings
    return integer(inner, "max_position_embeddings", default)


def _original_length(settings: Mapping[str, object], parameters: Mapping[str, object]) -> int:
    """The longest text before the rotation was scaled, in tokens. Raises ModelError.

    With one rotation for all layers, the library reads the setting outside of the parameters.
    """
    longest = integer(settings, "max_position_embeddings")
    inner = integer(parameters, "original_max_position_embeddings", longest)
    return integer(settings, "original_max_position_embeddings", inner)


def _object(value: object, name: str) -> Mapping[str, object]:
    """An object; empty if it is absent or null. Raises ModelError."""
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{name}: must be an object, got {value!r}")
    return value or {}


def _type_of(parameters: Mapping[str, object]) -> str:
    rope_type = str(parameters.get("rope_type", parameters.get("type", "default")))
    return _OLD_TYPES.get(rope_type, rope_type)


def _read(settings: Mapping[str, object], parameters: Mapping[str, object], theta_name: str) -> RopeSpec:
    """One rotary embedding. In the old spelling its base is the setting `theta_name`."""
    longest = integer(settings, "max_position_embeddings")
    theta = number(parameters, "rope_theta", number(settings, theta_name, 10_000.0))
    rope_type = _type_of(parameters)
    if rope_type == "default":
        return RopeSpec(theta=theta)
    original = _original_length(settings, parameters)
    # A missing factor is an error, except for the types whose default is known.
    factors = {"longrope": longest / original, "proportional": 1.0}
    is_partial = rope_type == "proportional"
    # With longrope the library rotates all keys differently once a sequence exceeds the original length. Keys
    # in pages are rotated already, so that is the limit.
    limits = {"longrope": min(longest, original), "dynamic": longest}
    try:
        return RopeSpec(
            theta=theta,
            rope_type=rope_type,
            factor=number(parameters, "factor", factors.get(rope_type)),
            original_max_position_embeddings=original,
            low_freq_factor=number(parameters, "low_freq_factor", 1.0),
            high_freq_factor=number(parameters, "high_freq_factor", 4.0),
            beta_fast=number(parameters, "beta_fast", 32.0),
            beta_slow=number(parameters, "beta_slow", 1.0),
            attention_factor=optional_number(parameters, "attention_factor"),
            mscale=optional_number(parameters, "mscale"),
            mscale_all_dim=optional_number(parameters, "mscale_all_dim"),
            # For the library null is false here.
            truncate=boolean(parameters, "truncate", default="truncate" not in parameters),
            max_position_embeddings=limits.get(rope_type, 0),
            short_factor=positive_numbers(parameters, "short_factor"),
            long_factor=positive_numbers(parameters, "long_factor"),
            partial_rotary_factor=number(parameters, "partial_rotary_factor", 1.0) if is_partial else 1.0,
        )
    except ValueError as error:
        raise UnsupportedError(f"rope_parameters: {error}") from error
