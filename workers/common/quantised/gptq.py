"""GPTQ, as AutoGPTQ and GPTQModel write it: integers of 4 or 8 bits with a scale for each group of inputs."""

from __future__ import annotations

from collections.abc import Mapping

from workers.common.quantised.scheme import (
    NO_NAMES,
    Layout,
    NotUnderstood,
    Quantisation,
    Scheme,
    boolean,
    group_size,
    integer,
    one_of,
    shown,
)

# Which checkpoints have zero points that are less by one, as the first version of the format has them.
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_LEFT_OUT = "-:"


def read(settings: Mapping[str, object]) -> Quantisation:
    """Raises NotUnderstood."""
    form = one_of(settings, "checkpoint_format", *_OFFSETS, default=settings.get("format") or "gptq")
    one_of(settings, "pack_dtype", "int32", default="int32")
    one_of(settings, "is_marlin_format", False, default=False)
    if settings.get("adapter"):
        raise NotUnderstood("adapter: adapters inside of a model are not supported")
    dynamic = settings.get("dynamic") or {}
    # What it leaves out is known by its tensors.
    if not isinstance(dynamic, Mapping) or not all(name.startswith(_LEFT_OUT) for name in dynamic):
        raise NotUnderstood(f"dynamic: must only leave modules out, got {shown(dynamic)}")
    bits = integer(settings, "bits")
    if bits not in (4, 8):
        raise NotUnderstood(f"bits: must be 4 or 8, got {bits}")
    scheme = Scheme(
        Layout.GPTQ,
        bits,
        group_size(settings),
        has_zeros=not boolean(settings, "sym", default=True),
        zero_offset=_OFFSETS[str(form)],
        has_order=boolean(settings, "desc_act", default=False),
    )
    return Quantisation("gptq", [(None, scheme)], NO_NAMES)
