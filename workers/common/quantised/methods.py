"""Finds what a config.json says of quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from workers.common.quantised import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from workers.common.quantised.scheme import NotUnderstood, Quantisation, shown

SETTING: Final = "quantization_config"
# Where else a config may say it: an older spelling of compressed-tensors, and MLX.
_OTHER_SETTINGS: Final = ("compression_config", "quantization")
_TEXT: Final = "text_config"
METHODS: Final[Mapping[str, Callable[[Mapping[str, object]], Quantisation]]] = {
    "awq": awq.read,
    bitsandbytes.BITSANDBYTES: bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "fp8": fp8.read,
    "gptq": gptq.read,
    mxfp4.MXFP4: mxfp4.read,
}


def read_quantisation(settings: Mapping[str, object]) -> Quantisation | None:
    """What a config says of the weights; None: nothing, so they are not quantised.

    Args:
        settings: Those of a model. They may say it in those of the text part alone.

    Raises:
        NotUnderstood: It says something that cannot be served; the message names the setting and the method.
    """
    found = _said(settings)
    if found is None:
        return None
    name, said = found
    if name != SETTING:
        raise NotUnderstood(f"{name}: this way to say it is not supported")
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise NotUnderstood(f"{SETTING}: quant_method must be one of {known}, got {shown(method)}")
    try:
        return METHODS[method](said)
    except NotUnderstood as error:
        raise NotUnderstood(f"{SETTING} ({method}): {error}") from None


def is_quantised(settings: Mapping[str, object]) -> bool:
    """Whether a config says that the weights are quantised, in whatever way."""
    return _said(settings) is not None


def _said(settings: Mapping[str, object]) -> tuple[str, object] | None:
    """The setting that says it, and what."""
    text = settings.get(_TEXT)
    for part in (settings, text if isinstance(text, Mapping) else {}):
        if found := next(filter(part.get, (SETTING, *_OTHER_SETTINGS)), ""):
            return found, part[found]
    return None
