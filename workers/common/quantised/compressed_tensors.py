"""compressed-tensors, as llm-compressor writes it: integers of 4 or 8 bits, and 8-bit floats.

Source: `quantization/quant_config.py` and `quant_args.py` of the compressed-tensors library.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.common.patterns import Patience
from workers.common.quantised.scheme import (
    Layout,
    Names,
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

_MIXED = "mixed-precision"
_LAYOUTS = {
    "pack-quantized": Layout.PACKED,
    "int-quantized": Layout.BYTES,
    "float-quantized": Layout.FLOAT8,
    "naive-quantized": None,  # by the type of the weights
}
_OF_TYPE = {"int": Layout.BYTES, "float": Layout.FLOAT8}
_MAX_GROUPS = 64
_NOTES = {
    "input_activations": "inputs of projections have 8 bits in groups of 32, or the model's dtype: finer",
    "kv_cache_scheme": "keys and values keep the model's dtype: it is finer",
}


def read(settings: Mapping[str, object]) -> Quantisation:
    """Raises NotUnderstood."""
    # "frozen": models of 2024, which are compressed, too. If one is not, its tensors are refused.
    one_of(settings, "quantization_status", "compressed", "frozen", default="compressed")
    if settings.get("transform_config"):
        raise NotUnderstood("transform_config: transformed weights are not supported")
    sparsity = settings.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise NotUnderstood("sparsity_config: sparse weights are not supported")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not 0 < len(groups) <= _MAX_GROUPS:
        raise NotUnderstood(f"config_groups: must be 1 to {_MAX_GROUPS} groups, got {shown(groups)}")
    rules: list[tuple[Names | None, Scheme]] = []
    patience = Patience(NotUnderstood)
    notes = set[str]()
    for name, group in groups.items():
        where = f"config_groups.{shown(name)}"
        if not isinstance(group, Mapping):
            raise NotUnderstood(f"{where}: must be an object, got {shown(group)}")
        try:
            scheme = _scheme(group, group.get("format") or settings.get("format"))
            names = Names.read(group.get("targets"), "targets", patience)
        except NotUnderstood as error:
            raise NotUnderstood(f"{where}: {error}") from None
        # The last group with a target counts.
        rules.insert(0, (names, scheme))
        notes |= {"input_activations"} if group.get("input_activations") else set()
    notes |= {"kv_cache_scheme"} if settings.get("kv_cache_scheme") else set()
    ignored = Names.read(settings.get("ignore"), "ignore", patience)
    said = tuple(f"{note}: {_NOTES[note]}" for note in sorted(notes))
    return Quantisation("compressed-tensors", rules, ignored, said)


def _scheme(group: Mapping[str, object], form: object) -> Scheme:
    """Raises NotUnderstood."""
    if group.get("output_activations"):
        raise NotUnderstood("output_activations: quantised results of projections are not supported")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise NotUnderstood(f"weights: must be an object, got {shown(weights)}")
    kind = str(one_of(weights, "type", "int", "float", default="int"))
    if not isinstance(form, str) or form not in _LAYOUTS:
        mixed = ", or each group its own" if form == _MIXED else ""
        raise NotUnderstood(f"format: must be {' or '.join(_LAYOUTS)}{mixed}, got {shown(form)}")
    layout = _LAYOUTS[form] or _OF_TYPE[kind]
    if (kind == "float") != (layout is Layout.FLOAT8):
        raise NotUnderstood(f"type: must not be {kind} in format {form}")
    return _floats(weights, layout) if layout is Layout.FLOAT8 else _integers(weights, layout)


def _floats(weights: Mapping[str, object], layout: Layout) -> Scheme:
    one_of(weights, "num_bits", 8)
    one_of(weights, "symmetric", True, default=True)
    strategy = one_of(weights, "strategy", "tensor", "channel", "block", default="tensor")
    block = block_sizes(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise NotUnderstood("block_structure: is needed")
    return Scheme(layout, 8, block=block)


def _integers(weights: Mapping[str, object], layout: Layout) -> Scheme:
    bits = integer(weights, "num_bits", 8)
    if bits not in (4, 8):
        raise NotUnderstood(f"num_bits: must be 4 or 8, got {shown(bits)}")
    inferred = "group" if isinstance(weights.get("group_size"), int) else "tensor"
    strategy = one_of(weights, "strategy", "tensor", "channel", "group", default=inferred)
    order = weights.get("actorder")
    # "weight" and "static" are about how the weights were found.
    if not (order is None or isinstance(order, bool) or order in ("group", "dynamic", "weight", "static")):
        raise NotUnderstood(f"actorder: must be group or weight, got {shown(order)}")
    return Scheme(
        layout,
        bits,
        group_size(weights) if strategy == "group" else 0,
        has_zeros=not boolean(weights, "symmetric", default=True),
        has_order=order in (True, "group", "dynamic"),
    )
