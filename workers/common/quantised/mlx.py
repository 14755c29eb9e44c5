"""MLX, as mlx-lm and mlx-vlm write it: integers with a scale and a minimum for each group of inputs.

The config names the bits and the group of all modules, and those of modules that differ. The tensors say
which modules are quantised. Or 4-bit floats with powers of two as scales, MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.common.quantised.scheme import (
    Layout,
    Names,
    NotUnderstood,
    Quantisation,
    Scheme,
    integer,
    one_of,
    shown,
)

METHOD = "mlx"
SETTING = "quantization"
_VALUES = {"bits": (2, 3, 4, 5, 6, 8), "group_size": (32, 64, 128)}
_OF_ALL = ("group_size", "bits", "mode")


def read(settings: Mapping[str, object]) -> Quantisation:
    """Raises NotUnderstood."""
    of_all, ignored = _scheme(settings), set[str]()
    modules: dict[Scheme, set[str]] = {}
    for name, value in settings.items():
        if name in _OF_ALL:
            continue
        if not isinstance(value, bool | Mapping):
            raise NotUnderstood(f"{shown(name)}: is not known, got {shown(value)}")
        if value is False:
            ignored.add(name)
        elif value is not True:
            try:
                modules.setdefault(_scheme(value), set()).add(name)
            except NotUnderstood as error:
                raise NotUnderstood(f"{shown(name)}: {error}") from None
    rules = [(Names(frozenset(names), ()), scheme) for scheme, names in modules.items()]
    return Quantisation(METHOD, [*rules, (None, of_all)], Names(frozenset(ignored), ()))


def _scheme(settings: Mapping[str, object]) -> Scheme:
    """Raises NotUnderstood."""
    if one_of(settings, "mode", "affine", "mxfp4", default="affine") == "mxfp4":
        one_of(settings, "bits", 4, default=4)
        one_of(settings, "group_size", 32, default=32)
        return Scheme(Layout.MLX_FLOATS, 4, 32)
    for name, values in _VALUES.items():
        one_of(settings, name, *values)
    return Scheme(Layout.MLX, integer(settings, "bits"), integer(settings, "group_size"), has_minima=True)
