"""Decodes the tensors and the experts of a response, without numpy."""

from __future__ import annotations

import array
import struct
import sys
from typing import Literal

from quire.v1 import types_pb2

# Up to so many experts of a layer, the id of one takes one byte, else two.
_ONE_BYTE_EXPERTS = 256


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


def expert_ids(data: bytes, model: types_pb2.ModelDescription) -> memoryview[int]:
    """The experts of tokens, of shape [tokens, moe_layers, experts_per_token]. numpy copies nothing.

    `expert_ids(...)[token, layer, 0]` is the one with the highest weight; `.tolist()` gives nested lists.

    Args:
        data: `StepOutput.experts` of one token, or of several, joined. At least one.
        model: From `model_info().model`.

    Raises:
        ValueError: The length of the data is not that of tokens of the model.
    """
    typecode: Literal["B", "H"] = "B" if model.num_experts <= _ONE_BYTE_EXPERTS else "H"
    ids = array.array(typecode, data)
    if typecode == "H" and sys.byteorder == "big":
        ids.byteswap()
    token = model.moe_layers * model.experts_per_token
    if not ids or not token or len(ids) % token:
        raise ValueError(f"{len(ids)} experts of tokens that have {token} each")
    shape = (len(ids) // token, model.moe_layers, model.experts_per_token)
    return memoryview(ids).cast("B").cast(typecode, shape)
