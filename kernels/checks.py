"""Argument checks shared by the wrappers of all kernels.

They run on every call, so they only read metadata: no device tensor is read back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.packed_pages import LeadingValues, PackedKeys, PackedValues, Pages

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: Pages,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Check one argument.

    Args:
        name: The argument's name, for the message.
        tensor: The argument.
        shape: The expected size of each dimension; None: any size.
        dtypes: The allowed dtypes.

    Raises:
        ValueError: The shape differs, or the last dimension is not contiguous.
        TypeError: The dtype is not allowed.
    """
    actual = tensor.shape
    fits = len(actual) == len(shape)
    # A generator expression would call a function for each dimension.
    for want, got in zip(shape, actual, strict=False):
        fits = fits and (want is None or want == got)
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape must be [{expected}], got {list(actual)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype must be one of {list(dtypes)}, got {tensor.dtype}")
    if actual and actual[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {tensor.stride()}")


def check_same(name: str, tensor: Pages, other_name: str, other: torch.Tensor) -> None:
    """Check that two arguments agree in dtype and device.

    Raises:
        TypeError: They differ.
    """
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise TypeError(
            f"{name}: must have the dtype and device of {other_name} ({other.dtype} on {other.device}), "
            f"got {tensor.dtype} on {tensor.device}"
        )


def check_pages(
    k_pages: Pages,
    v_pages: Pages | LeadingValues,
    kv_heads: int | None,
    width: int,
    other_name: str,
    other: torch.Tensor,
    *,
    value_width: int | None = None,
) -> None:
    """Check the pages of keys and values, [pages, S, K, D] each, both packed or both plain.

    Args:
        k_pages: Pages of keys.
        v_pages: Pages of values.
        kv_heads: K; None: any.
        width: D.
        other_name: The name of the argument whose dtype and device they must have; packed ones may be
            narrower.
        other: That argument.
        value_width: The width of values; None: the same as that of keys.

    Raises:
        ValueError: A shape differs, or pages are not contiguous.
        TypeError: Dtype or device differ, or one is packed or quantised and the other is not.
    """
    if isinstance(v_pages, LeadingValues):
        fit = v_pages.keys is k_pages
    elif isinstance(k_pages, PackedKeys) and isinstance(v_pages, PackedValues):
        fit = k_pages.is_quantised == v_pages.is_quantised
    else:
        fit = isinstance(k_pages, torch.Tensor) and isinstance(v_pages, torch.Tensor)
    if not fit:
        raise TypeError(
            f"v_pages: must be packed and quantised if k_pages are, and only then, got"
            f" {type(v_pages).__name__} and {type(k_pages).__name__}"
        )
    check_tensor("k_pages", k_pages, (None, None, kv_heads, width), FLOAT_DTYPES)
    checked = [("k_pages", k_pages)]
    if not isinstance(v_pages, LeadingValues):
        value_shape = (*k_pages.shape[:3], width if value_width is None else value_width)
        check_tensor("v_pages", v_pages, value_shape, FLOAT_DTYPES)
        checked.append(("v_pages", v_pages))
    for name, pages in checked:
        if isinstance(pages, torch.Tensor) or other.dtype not in pages.row_dtypes:
            check_same(name, pages, other_name, other)
        if not pages.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {pages.stride()}")
