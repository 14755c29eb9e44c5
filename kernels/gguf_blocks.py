"""Reads the blocks of GGUF's quantised tensors into their parts, and writes those of `kernels.quantisers`.

The source is ggml-quants.c of llama.cpp, and the `quants` module of the package gguf, with which tests
compare.

Dimension letters: n rows; b blocks of a row; G groups of 32 inputs; S scales of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from kernels.group_formats import GROUP_INPUTS
from kernels.group_layout import Parts

_NOT_A_NUMBER = 255


def parts_of(name: str, raw: torch.Tensor, inputs: int) -> Parts:
    """The parts of rows.

    Args:
        name: A format of GGUF.
        raw: [n, bytes of a row] uint8, as a file has them.
        inputs: Those of a row.

    Raises:
        ValueError: A row of so many inputs has not so many bytes.
    """
    block_inputs, block_bytes, read = _READERS[name]
    blocks, rest = divmod(inputs, block_inputs)
    if rest or raw.shape[1] != blocks * block_bytes:
        raise ValueError(f"{name}: {inputs} inputs are not {raw.shape[1]} bytes")
    return read(raw.view(-1, blocks, block_bytes))


def blocks_of(name: str, parts: Parts) -> torch.Tensor:
    """The rows of a file: the reverse of `parts_of`.

    Args:
        name: A format of `kernels.quantisers`.
        parts: [n, ...] of whole blocks.

    Returns:
        [n, bytes of a row] uint8.

    Raises:
        ValueError: The rows are not of whole blocks.
    """
    block_inputs, block_bytes, _ = _READERS[name]
    count, groups = parts.values.shape[:2]
    blocks, rest = divmod(groups * GROUP_INPUTS, block_inputs)
    if rest:
        raise ValueError(f"{name}: {groups} groups of {GROUP_INPUTS} are not whole blocks of {block_inputs}")
    split = {name: part.reshape(count, blocks, -1) for name, part in parts.factors().items()}
    written = _WRITERS[name](parts.values.view(count, blocks, block_inputs), split)
    return torch.cat([part.view(torch.uint8) for part in written], dim=2).view(count, blocks * block_bytes)


def _float16(raw: torch.Tensor) -> torch.Tensor:
    """[n, b, 2] -> [n, b]."""
    return raw.contiguous().view(torch.float16)[:, :, 0]


def _in_groups(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(len(values), -1, GROUP_INPUTS)


def _per_row(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).view(torch.int8)


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """Bytes whose low halves are the first 16 values of a group: [n, b, 16] -> [n, b, 32]."""
    return torch.cat([raw & 15, raw >> 4], dim=2)


def _planes(raw: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Bytes with several values each: in each `width` bytes the first ones of all, then the next ones, ...

    [n, b, bytes] -> [n, b, values]
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    mask = (1 << bits) - 1
    apart = raw.reshape(*raw.shape[:2], -1, 1, width) >> shifts & mask
    return apart.flatten(2)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """[n, b, 4] -> [n, b, 32]: of each bit in order the 16 of 5 bits."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2) << 4


def _q8_0(raw: torch.Tensor) -> Parts:
    return Parts(_in_groups(raw[..., 2:] ^ 128), _float16(raw[..., :2]))


def _q4_0(raw: torch.Tensor) -> Parts:
    return Parts(_in_groups(_halves(raw[..., 2:])), _float16(raw[..., :2]))


def _q4_1(raw: torch.Tensor) -> Parts:
    return Parts(_in_groups(_halves(raw[..., 4:])), _float16(raw[..., :2]), _float16(raw[..., 2:4]))


def _q5_0(raw: torch.Tensor) -> Parts:
    values = _halves(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return Parts(_in_groups(values), _float16(raw[..., :2]))


def _q5_1(raw: torch.Tensor) -> Parts:
    values = _halves(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return Parts(_in_groups(values), _float16(raw[..., :2]), _float16(raw[..., 2:4]))


def _q2_k(raw: torch.Tensor) -> Parts:
    values = _in_groups(_planes(raw[..., 16:80], 2, 32))
    scale, minimum = _float16(raw[..., 80:82]), _float16(raw[..., 82:])
    return Parts(values, scale, minimum, subscales=_per_row(raw[..., :16]))


def _q3_k(raw: torch.Tensor) -> Parts:
    values = _planes(raw[..., 32:96], 2, 32) | _planes(raw[..., :32], 1, 32) << 2
    low, high = _planes(raw[..., 96:104], 4, 8), _planes(raw[..., 104:108], 2, 4)
    return Parts(_in_groups(values), _float16(raw[..., 108:]), subscales=_per_row((low | high << 4) - 32))


def _six_bits(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Subscales and subminima of eight groups: [n, b, 12] -> [n, b * 8] twice."""
    scales, minima, both = torch.tensor_split(raw, 3, dim=2)
    later = both & 15 | scales >> 2 & 48, both >> 4 | minima >> 2 & 48
    first = scales & 63, minima & 63
    return _per_row(torch.cat([first[0], later[0]], dim=2)), _per_row(torch.cat([first[1], later[1]], dim=2))


def _q4_k(raw: torch.Tensor) -> Parts:
    subscales, subminima = _six_bits(raw[..., 4:16])
    values = _in_groups(_planes(raw[..., 16:], 4, 32))
    scale, minimum = _float16(raw[..., :2]), _float16(raw[..., 2:4])
    return Parts(values, scale, minimum, subscales=subscales, subminima=subminima)


def _q5_k(raw: torch.Tensor) -> Parts:
    subscales, subminima = _six_bits(raw[..., 4:16])
    values = _planes(raw[..., 48:], 4, 32) | _planes(raw[..., 16:48], 1, 32) << 4
    scale, minimum = _float16(raw[..., :2]), _float16(raw[..., 2:4])
    return Parts(_in_groups(values), scale, minimum, subscales=subscales, subminima=subminima)


def _q6_k(raw: torch.Tensor) -> Parts:
    values = _planes(raw[..., :128], 4, 64) | _planes(raw[..., 128:192], 2, 32) << 4
    return Parts(_in_groups(values), _float16(raw[..., 208:]), subscales=_per_row(raw[..., 192:208]))


def _iq4_xs(raw: torch.Tensor) -> Parts:
    low = (raw[..., 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15).flatten(2)
    high = (raw[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(2)
    values = _halves(raw[..., 8:].reshape(len(raw), -1, 16))
    return Parts(values, _float16(raw[..., :2]), subscales=_per_row((low | high << 4) - 32))


def _mxfp4(raw: torch.Tensor) -> Parts:
    """An exponent e of a block is the scale 2^(e - 127), half of which multiplies the table; 255 is NaN."""
    exponents = raw[..., 0].int()
    scales = torch.where(
        exponents == _NOT_A_NUMBER, torch.nan, torch.ldexp(torch.ones(exponents.shape), exponents - 128)
    )
    return Parts(_in_groups(_halves(raw[..., 1:])), scales.to(torch.bfloat16))


# The inputs and bytes of a block.
_READERS: Mapping[str, tuple[int, int, Callable[[torch.Tensor], Parts]]] = {
    "q8_0": (32, 34, _q8_0),
    "q4_0": (32, 18, _q4_0),
    "q4_1": (32, 20, _q4_1),
    "q5_0": (32, 22, _q5_0),
    "q5_1": (32, 24, _q5_1),
    "q2_k": (256, 84, _q2_k),
    "q3_k": (256, 110, _q3_k),
    "q4_k": (256, 144, _q4_k),
    "q5_k": (256, 176, _q5_k),
    "q6_k": (256, 210, _q6_k),
    "iq4_nl": (32, 18, _q4_0),
    "iq4_xs": (256, 136, _iq4_xs),
    "mxfp4": (32, 17, _mxfp4),
}


def _together(values: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """The reverse of `_planes`, of values of so many bits: [n, b, values] -> [n, b, bytes]."""
    apart = values.view(*values.shape[:2], -1, 8 // bits, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (apart << shifts).sum(3, dtype=torch.uint8).flatten(2)


def _fifth_bits_together(values: torch.Tensor) -> torch.Tensor:
    """The reverse of `_fifth_bits`: [n, b, 32] -> [n, b, 4]."""
    bits = (values >> 4).view(*values.shape[:2], -1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(3, dtype=torch.uint8)


def _six_bits_together(subscales: torch.Tensor, subminima: torch.Tensor) -> torch.Tensor:
    """The reverse of `_six_bits`: [n, b, 8] twice -> [n, b, 12]."""
    scales, minima = subscales.view(torch.uint8), subminima.view(torch.uint8)
    later = scales[..., 4:], minima[..., 4:]
    first = scales[..., :4] | later[0] >> 4 << 6, minima[..., :4] | later[1] >> 4 << 6
    return torch.cat([*first, later[0] & 15 | later[1] << 4], dim=2)


Factors: TypeAlias = Mapping[str, torch.Tensor]


def _write_q8_0(values: torch.Tensor, factors: Factors) -> Sequence[torch.Tensor]:
    return factors["scales"], values ^ 128


def _write_q4_0(values: torch.Tensor, factors: Factors) -> Sequence[torch.Tensor]:
    return factors["scales"], _together(values, 4, 16)


def _write_q5_0(values: torch.Tensor, factors: Factors) -> Sequence[torch.Tensor]:
    return factors["scales"], _fifth_bits_together(values), _together(values & 15, 4, 16)


def _write_q4_k(values: torch.Tensor, factors: Factors) -> Sequence[torch.Tensor]:
    beside = _six_bits_together(factors["subscales"], factors["subminima"])
    return factors["scales"], factors["minima"], beside, _together(values, 4, 32)


def _write_q5_k(values: torch.Tensor, factors: Factors) -> Sequence[torch.Tensor]:
    beside = _six_bits_together(factors["subscales"], factors["subminima"])
    fifth, low = _together(values >> 4, 1, 32), _together(values & 15, 4, 32)
    return factors["scales"], factors["minima"], beside, fifth, low


def _write_q6_k(values: torch.Tensor, factors: Factors) -> Sequence[torch.Tensor]:
    low, high = _together(values & 15, 4, 64), _together(values >> 4, 2, 32)
    return low, high, factors["subscales"], factors["scales"]


_WRITERS: Mapping[str, Callable[[torch.Tensor, Factors], Sequence[torch.Tensor]]] = {
    "q8_0": _write_q8_0,
    "q5_0": _write_q5_0,
    "q4_0": _write_q4_0,
    "q4_k": _write_q4_k,
    "q5_k": _write_q5_k,
    "q6_k": _write_q6_k,
}
