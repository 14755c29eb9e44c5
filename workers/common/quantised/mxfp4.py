"""MXFP4, as gpt-oss has it: 4-bit floats in groups of 32 inputs, each with a power of two as its scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.common.quantised.scheme import NO_NAMES, NotUnderstood, Quantisation, shown

MXFP4: Final = "mxfp4"
_KNOWN = {"quant_method", "modules_to_not_convert", "dequantize"}


def read(settings: Mapping[str, object]) -> Quantisation:
    """Raises NotUnderstood."""
    for name in settings.keys() - _KNOWN:
        if settings[name]:
            raise NotUnderstood(f"{name}: is not known, got {shown(settings[name])}")
    # What `modules_to_not_convert` leaves out is known by its tensors: others have blocks and scales.
    return Quantisation(MXFP4, [], NO_NAMES)
