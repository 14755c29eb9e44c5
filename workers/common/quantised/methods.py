"""What a config.json says of quantised weights, by the method that has quantised them.

The tensors say which modules are quantised, so what settings such as `modules_to_not_convert` leave out is
not read, but of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from workers.common.quantised import compressed_tensors, mlx
from workers.common.quantised.scheme import (
    NO_NAMES,
    Layout,
    NotUnderstood,
    Quantisation,
    Scheme,
    block_sizes,
    boolean,
    group_size,
    integer,
    one_of,
    shown,
)

SETTING: Final = "quantization_config"
# Where else a config may say it: an older spelling of compressed-tensors.
_OTHER_SETTING: Final = "compression_config"
# The settings of a text part; the second: of InternVL, as its makers publish it.
_TEXTS: Final = ("text_config", "llm_config")

# The files in which tools of 2023, AutoGPTQ and AutoAWQ, wrote it, and the method of each.
_FILES: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

BITSANDBYTES: Final = "bitsandbytes"
MXFP4: Final = "mxfp4"
_DTYPE_OF_INPUTS = "{}: inputs of projections keep the model's dtype: it is finer"
_BYTES_OF_INPUTS = "inputs of projections have 8 bits in groups of 32, whatever the config says of computing"
# Which GPTQ checkpoints have zero points that are less by one, as the first version of the format has them.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# The prefix in GPTQ's `dynamic` of modules that are not quantised.
_LEFT_OUT = "-:"
# The packings of AutoRound, with the methods that they stand for; and the bits of modules that it leaves out.
_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
_UNQUANTISED_BITS = 16
_SETTINGS_OF_MXFP4 = {"quant_method", "modules_to_not_convert", "dequantize"}


def _awq(settings: Mapping[str, object]) -> Quantisation:
    """As AutoAWQ writes it ("gemm"): integers of 4 bits, a scale and a zero point for a group of inputs."""
    version = settings.get("version") or settings.get("format")
    version = version.lower() if isinstance(version, str) else version
    one_of({"version": version}, "version", "gemm", default="gemm")
    one_of(settings, "bits", 4, default=settings.get("w_bit"))
    one_of(settings, "zero_point", True, default=True)
    name = "group_size" if "group_size" in settings else "q_group_size"
    scheme = Scheme(Layout.AWQ, 4, group_size(settings, name), has_zeros=True)
    return Quantisation("awq", [(None, scheme)], NO_NAMES)


def _bitsandbytes(settings: Mapping[str, object]) -> Quantisation:
    """Values of 4 bits in a table (NF4, FP4), or of 8 bits with a scale for a row (LLM.int8).

    Types and blocks are known by the tensors.
    """
    four = boolean(settings, "load_in_4bit", default=False)
    if four == boolean(settings, "load_in_8bit", default=False):
        raise NotUnderstood("load_in_4bit: either this or load_in_8bit must be true")
    if four:
        one_of(settings, "bnb_4bit_quant_type", "fp4", "nf4", default="fp4")
    scheme = Scheme(Layout.TABLE if four else Layout.ROWS_OF_BYTES, 4 if four else 8)
    return Quantisation(BITSANDBYTES, [(None, scheme)], NO_NAMES, (_BYTES_OF_INPUTS,))


def _fp8(settings: Mapping[str, object]) -> Quantisation:
    """8-bit floats (e4m3) with scales for blocks (DeepSeek, Qwen), or for matrices."""
    one_of(settings, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    one_of(settings, "scale_fmt", "float", "ue8m0", default="float")
    one_of(settings, "activation_scheme", "dynamic", "static", default="dynamic")
    scheme = Scheme(Layout.FLOAT8, 8, block=block_sizes(settings, "weight_block_size"))
    return Quantisation("fp8", [(None, scheme)], NO_NAMES, (_DTYPE_OF_INPUTS.format("activation_scheme"),))


def _fbgemm_fp8(settings: Mapping[str, object]) -> Quantisation:
    """8-bit floats with scales for rows."""
    limit = "activation_scale_ub"
    notes = (_DTYPE_OF_INPUTS.format(limit),) if limit in settings else ()
    return Quantisation("fbgemm_fp8", [(None, Scheme(Layout.FLOAT8, 8))], NO_NAMES, notes)


def _gptq(settings: Mapping[str, object]) -> Quantisation:
    """As AutoGPTQ and GPTQModel write it: integers of 2, 3, 4 or 8 bits, a scale for a group of inputs."""
    form = one_of(settings, "checkpoint_format", *_ZERO_OFFSETS, default=settings.get("format") or "gptq")
    one_of(settings, "pack_dtype", "int32", default="int32")
    one_of(settings, "is_marlin_format", False, default=False)
    if settings.get("adapter"):
        raise NotUnderstood("adapter: adapters inside of a model are not supported")
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(name.startswith(_LEFT_OUT) for name in dynamic):
        raise NotUnderstood(f"dynamic: must only leave modules out, got {shown(dynamic)}")
    bits, symmetric = integer(settings, "bits"), boolean(settings, "sym", default=True)
    if bits not in (2, 3, 4, 8):
        raise NotUnderstood(f"bits: must be 2, 3, 4 or 8, got {bits}")
    offset = _ZERO_OFFSETS[str(form)]
    if bits == 3 and offset and not symmetric:
        # The borrow of a zero point would go from word to word, or not.
        raise NotUnderstood("sym: must be true with 3 bits, unless checkpoint_format is gptq_v2")
    scheme = Scheme(
        Layout.GPTQ,
        bits,
        group_size(settings),
        has_zeros=not symmetric,
        zero_offset=offset,
        has_order=boolean(settings, "desc_act", default=False),
    )
    return Quantisation("gptq", [(None, scheme)], NO_NAMES)


def _auto_round(settings: Mapping[str, object]) -> Quantisation:
    """As AutoRound writes it: in the layout of GPTQ or AWQ. All zero points of GPTQ's are in the middle."""
    packing = one_of(settings, "packing_format", *_PACKINGS)
    one_of(settings, "data_type", "int", default="int")
    others = settings.get("extra_config") or {}
    parts = others.values() if isinstance(others, Mapping) else [others]
    if any(not isinstance(part, Mapping) or part.get("bits") != _UNQUANTISED_BITS for part in parts):
        raise NotUnderstood(f"extra_config: must only leave modules out, got {shown(others)}")
    if _PACKINGS[str(packing)] == "awq":
        return _awq({**settings, "zero_point": True})
    one_of(settings, "sym", True)
    return _gptq(settings)


def _modelopt(settings: Mapping[str, object]) -> Quantisation:
    """8-bit floats with a scale for a matrix, as NVIDIA publishes them."""
    one_of(settings, "quant_algo", "FP8")
    return Quantisation("modelopt", [(None, Scheme(Layout.FLOAT8, 8))], NO_NAMES)


def _mxfp4(settings: Mapping[str, object]) -> Quantisation:
    """As gpt-oss has it: 4-bit floats in groups of 32 inputs, each with a power of two as its scale."""
    for name in settings.keys() - _SETTINGS_OF_MXFP4:
        if settings[name]:
            raise NotUnderstood(f"{name}: is not known, got {shown(settings[name])}")
    return Quantisation(MXFP4, [], NO_NAMES)


METHODS: Final[Mapping[str, Callable[[Mapping[str, object]], Quantisation]]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    BITSANDBYTES: _bitsandbytes,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    mlx.METHOD: mlx.read,
    "modelopt": _modelopt,
    MXFP4: _mxfp4,
}
"""Each raises NotUnderstood."""


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
    if name == _OTHER_SETTING:
        raise NotUnderstood(f"{name}: this way to say it is not supported")
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    method = mlx.METHOD if name == mlx.SETTING else method
    if not isinstance(said, Mapping) or not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise NotUnderstood(f"{name}: quant_method must be one of {known}, got {shown(method)}")
    try:
        return METHODS[method](said)
    except NotUnderstood as error:
        raise NotUnderstood(f"{name} ({method}): {error}") from None


def with_file_of_tool(
    settings: Mapping[str, object], content_of: Callable[[str], Mapping[str, object]]
) -> Mapping[str, object]:
    """The settings of a config.json, with what a file beside it says of the weights, if they do not.

    Args:
        settings: Those of a model.
        content_of: The content of a file by its name; empty if it is not there.
    """
    if not is_quantised(settings):
        for name, method in _FILES.items():
            if said := content_of(name):
                return {**settings, SETTING: {"quant_method": method, **said}}
    return settings


def is_quantised(settings: Mapping[str, object]) -> bool:
    """Whether a config says that the weights are quantised, in whatever way."""
    return _said(settings) is not None


def _said(settings: Mapping[str, object]) -> tuple[str, object] | None:
    """The setting that says it, and what. MLX also writes its own into `SETTING`, without a method."""
    for part in (settings, *map(settings.get, _TEXTS)):
        if not isinstance(part, Mapping):
            continue
        if found := next(filter(part.get, (mlx.SETTING, SETTING, _OTHER_SETTING)), ""):
            return found, part[found]
    return None
