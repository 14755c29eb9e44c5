"""Multiplies a few rows by a weight in oneDNN's packed layout, with the kernel in linear.cpp.

oneDNN's own product of few rows leaves a fifth to a third of the memory's bandwidth unused. Its layout of
packed bfloat16 weights on AVX-512 is not documented. So `understands_layout` checks it once per process: it
packs a small matrix of known elements and compares the order. With any other layout, of another version or
CPU, oneDNN's own product is used.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels.cpu import library

# For more rows oneDNN is faster, as measured.
MOST_ROWS = 8
_BLOCK_OUTPUTS = 64


class _Arguments(ctypes.Structure):
    """The struct of the same name in linear.cpp: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "padded_inputs")),
        *((name, ctypes.c_int64) for name in ("x_stride", "threads")),
    )


def can_multiply(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is available and supports these rows [T, I] and this packed weight [O, I]."""
    return 0 < x.shape[0] <= MOST_ROWS and x.shape[1] % 2 == 0 and weight.is_mkldnn and understands_layout()


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.linear.linear`, which checks the arguments. Requires `can_multiply`."""
    outputs, inputs = weight.shape
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype)  # [T, O]
    arguments = _Arguments(
        out.data_ptr(),
        x.data_ptr(),
        torch.ops.mkldnn.data_ptr(weight),
        None if bias is None else bias.data_ptr(),
        x.shape[0],
        inputs,
        outputs,
        padded_inputs(weight),
        x.stride(0),
        torch.get_num_threads(),
    )
    library.function("quire_linear_bf16", (ctypes.c_void_p,))(ctypes.addressof(arguments))
    return out


def padded_inputs(weight: torch.Tensor) -> int:
    """The inputs of a packed weight [O, I] in its layout, with the padding of the last block."""
    padded_outputs = -(-weight.shape[0] // _BLOCK_OUTPUTS) * _BLOCK_OUTPUTS
    size: int = torch.ops.mkldnn._nbytes(weight)
    return size // weight.element_size() // padded_outputs


def packs_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU, and so can pack bfloat16 weights."""
    return torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def understands_layout() -> bool:
    """Whether oneDNN packs weights in the layout that linear.cpp reads, and that kernel is available."""
    if not library.has_function("quire_linear_bf16") or not packs_bfloat16():
        return False
    # Neither size is a multiple of a block, so that the padding of the last blocks is checked too.
    outputs, inputs = 200, 144
    indices = torch.arange(outputs * inputs).view(outputs, inputs)
    found = sum(_packed_bytes((indices >> shift) & 0xFF) << shift for shift in (0, 8))
    assert isinstance(found, torch.Tensor)
    blocks = -(-outputs // _BLOCK_OUTPUTS)
    padded_inputs, rest = divmod(len(found), blocks * _BLOCK_OUTPUTS)
    if rest or padded_inputs < inputs or padded_inputs % 2:
        return False
    expected = torch.zeros(blocks * _BLOCK_OUTPUTS, padded_inputs, dtype=torch.int64)
    expected[:outputs, :inputs] = indices
    by_block = expected.view(blocks, _BLOCK_OUTPUTS, padded_inputs // 2, 2).transpose(1, 2)
    return torch.equal(found.view(by_block.shape), by_block)


def _packed_bytes(values: torch.Tensor) -> torch.Tensor:
    """Numbers below 256 [O, I] in the order of the packed layout, as [n] int64."""
    weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(values.bfloat16(), 32)
    size = torch.ops.mkldnn._nbytes(weight)
    raw = ctypes.string_at(torch.ops.mkldnn.data_ptr(weight), size)
    return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).long()
