"""bitsandbytes: values of 4 bits in a table (NF4, FP4), or of 8 bits with a scale for a row (LLM.int8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.common.quantised.scheme import (
    NO_NAMES,
    Layout,
    NotUnderstood,
    Quantisation,
    Scheme,
    boolean,
    one_of,
)

BITSANDBYTES: Final = "bitsandbytes"
_NOTE = "inputs of projections have 8 bits in groups of 32, whatever the config says of computing"


def read(settings: Mapping[str, object]) -> Quantisation:
    """Raises NotUnderstood. What modules are left out, types and blocks are known by the tensors."""
    four = boolean(settings, "load_in_4bit", default=False)
    if four == boolean(settings, "load_in_8bit", default=False):
        raise NotUnderstood("load_in_4bit: either this or load_in_8bit must be true")
    if four:
        one_of(settings, "bnb_4bit_quant_type", "fp4", "nf4", default="fp4")
    scheme = Scheme(Layout.TABLE if four else Layout.ROWS_OF_BYTES, 4 if four else 8)
    return Quantisation(BITSANDBYTES, [(None, scheme)], NO_NAMES, (_NOTE,))
