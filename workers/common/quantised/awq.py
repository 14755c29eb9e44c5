"""AWQ, as AutoAWQ writes it ("gemm"): integers of 4 bits, a scale and a zero point for a group of inputs."""

from __future__ import annotations

from collections.abc import Mapping

from workers.common.quantised.scheme import NO_NAMES, Layout, Quantisation, Scheme, group_size, one_of


def read(settings: Mapping[str, object]) -> Quantisation:
    """Raises NotUnderstood."""
    version = settings.get("version") or settings.get("format")
    version = version.lower() if isinstance(version, str) else version
    one_of({"version": version}, "version", "gemm", default="gemm")
    one_of(settings, "bits", 4, default=settings.get("w_bit"))
    one_of(settings, "zero_point", True, default=True)
    name = "group_size" if "group_size" in settings else "q_group_size"
    # What `modules_to_not_convert` leaves out is known by its tensors.
    scheme = Scheme(Layout.AWQ, 4, group_size(settings, name), has_zeros=True)
    return Quantisation("awq", [(None, scheme)], NO_NAMES)
