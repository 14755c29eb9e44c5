"""Finds what a config.json says of quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from workers.common.quantised import awq, compressed_tensors, fp8, gptq
from workers.common.quantised.scheme import NotUnderstood, Quantisation, shown

SETTING: Final = "quantization_config"
# Where else a config may say it: an older spelling of compressed-tensors, and MLX.
_OTHER_SETTINGS: Final = ("compression_config", "quantization")
METHODS: Final[Mapping[str, Callable[[Mapping[str, object]], Quantisation]]] = {
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "fp8": fp8.read,
    "gptq": gptq.read,
}


def read_quantisation(settings: Mapping[str, object]) -> Quantisation | None:
    """What a config says of the weights; None: nothing, so they are not quantised.

    Args:
        settings: Those of the whole model, or of its text part.

    Raises:
        NotUnderstood: It says something that cannot be served; the message names the setting and the method.
    """
    if found := next(filter(settings.get, _OTHER_SETTINGS), ""):
        raise NotUnderstood(f"{found}: this way to say it is not supported")
    said = settings.get(SETTING)
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(method, str) or method not in METHODS:
        raise NotUnderstood(
            f"{SETTING}: quant_method must be one of {', '.join(METHODS)}, got {shown(method)}"
        )
    try:
        return METHODS[method](said)
    except NotUnderstood as error:
        raise NotUnderstood(f"{SETTING} ({method}): {error}") from None
