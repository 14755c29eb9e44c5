"""Decodes the tensors of a response, without numpy."""

from __future__ import annotations

import array
import struct
import sys

from quire.v1 import types_pb2


def floats(tensor: types_pb2.Tensor) -> array.array[float]:
    """The elements of a row of logits or of a hidden state. numpy and torch can use the array without a copy.

    Raises:
        ValueError: The dtype is unknown, or the data does not match the shape.
    """
    values = array.array("f")
    match tensor.dtype:
        case types_pb2.DATA_TYPE_F32:
            values.frombytes(tensor.data)
            if sys.byteorder == "big":
                values.byteswap()
        case types_pb2.DATA_TYPE_F16:
            values.extend(struct.unpack(f"<{len(tensor.data) // 2}e", tensor.data))
        case types_pb2.DATA_TYPE_BF16:
            # A bfloat16 is the upper half of a float32.
            wide = bytearray(2 * len(tensor.data))
            wide[2::4], wide[3::4] = tensor.data[::2], tensor.data[1::2]
            return floats(
                types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_F32, shape=tensor.shape, data=bytes(wide))
            )
        case unknown:
            raise ValueError(f"a tensor of elements {unknown}")
    if [len(values)] != list(tensor.shape):
        raise ValueError(f"{len(values)} elements in a row of the shape {list(tensor.shape)}")
    return values
