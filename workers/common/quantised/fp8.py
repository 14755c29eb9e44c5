"""8-bit floats (e4m3): with scales for blocks (DeepSeek, Qwen), for rows (FBGEMM) or for matrices."""

from __future__ import annotations

from collections.abc import Mapping

from workers.common.quantised.scheme import (
    NO_NAMES,
    Layout,
    NotUnderstood,
    Quantisation,
    Scheme,
    one_of,
    shown,
)

_INPUTS = "{}: inputs of projections keep the model's dtype: it is finer"


def read(settings: Mapping[str, object]) -> Quantisation:
    """Raises NotUnderstood."""
    one_of(settings, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    one_of(settings, "scale_fmt", "float", "ue8m0", default="float")
    one_of(settings, "activation_scheme", "dynamic", "static", default="dynamic")
    # What `modules_to_not_convert` and `ignored_layers` leave out is known by its tensors.
    scheme = Scheme(Layout.FLOAT8, 8, block=read_block(settings, "weight_block_size"))
    notes = (_INPUTS.format("activation_scheme"),)
    return Quantisation("fp8", [(None, scheme)], NO_NAMES, notes)


def read_fbgemm(settings: Mapping[str, object]) -> Quantisation:
    """Of FBGEMM, whose scales are those of rows. Raises NotUnderstood."""
    notes = (_INPUTS.format("activation_scale_ub"),) if "activation_scale_ub" in settings else ()
    return Quantisation("fbgemm_fp8", [(None, Scheme(Layout.FLOAT8, 8))], NO_NAMES, notes)


def read_block(settings: Mapping[str, object], name: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block. Raises NotUnderstood."""
    value = settings.get(name)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 1 << 24 for size in sizes):
        raise NotUnderstood(f"{name}: must be two positive integers, got {shown(value)}")
    return sizes[0], sizes[1]
