"""What files hold, kept in memory: dequantised to the bit as the formats' own code does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import gguf
import pytest
import torch
from gguf import quants

from kernels.gguf_blocks import blocks_of, parts_of
from kernels.group_formats import FORMATS, TABLES, GroupFormat, integer_groups, table_groups
from kernels.grouped_weight import GroupedWeight
from kernels.quantisers import QUANTISERS, quantise
from tests.families import paired
from tests.kernels.grouped_weights import empty
from workers.common.gguf.header import TYPES

# Where a block has the upper bytes of its float16s.
_UPPER_BYTES = {
    "q4_1": (1, 3),
    "q5_1": (1, 3),
    "q2_k": (81, 83),
    "q3_k": (109,),
    "q4_k": (1, 3),
    "q5_k": (1, 3),
    "q6_k": (209,),
    "mxfp4": (0,),
}
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def random_blocks(name: str, outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows of a file with any bytes, but for float16s below 2."""
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        256, (outputs, inputs // block_inputs, block_bytes), generator=generator, dtype=torch.uint8
    )
    raw[:, :, _UPPER_BYTES.get(name, (1,))] &= 0xBF
    return raw.flatten(1)


def written_blocks(name: str, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> GroupedWeight:
    weight = empty(FORMATS[name], outputs, inputs, dtype)
    weight.write_blocks(0, random_blocks(name, outputs, inputs))
    return weight


def expected(name: str, raw: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name.upper()]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "chunks"), [(1, 1), (37, 3), (64, 2.5), (16, 0.125)])
def test_blocks_of_files_are_dequantised_as_by_their_own_code(name: str, outputs: int, chunks: float) -> None:
    inputs = int(256 * chunks)
    if inputs % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]][0]:
        inputs = 256
    raw = random_blocks(name, outputs, inputs)
    weight, rounded = (
        empty(FORMATS[name], outputs, inputs),
        empty(FORMATS[name], outputs, inputs, torch.bfloat16),
    )
    # In parts that begin within a block.
    for first in range(0, outputs, 7):
        assert weight.write_blocks(first, raw[first : first + 7]).isfinite().all()
        rounded.write_blocks(first, raw[first : first + 7])
    assert torch.equal(weight.dense(), expected(name, raw))
    assert torch.equal(rounded.dense(), expected(name, raw).bfloat16())
    index = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(weight.rows(index), weight.dense()[index])


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_take_about_the_bytes_that_they_had(name: str) -> None:
    raw = random_blocks(name, 32, 1024)
    assert written_blocks(name, 32, 1024).nbytes <= 1.06 * raw.nbytes


def integer_formats() -> Iterator[GroupFormat]:
    for bits in (8, 4, 3, 2):
        for group in (32, 64, 128, 256, 512, 0):
            for dtype in SCALE_DTYPES:
                for zeros in (True, False):
                    yield integer_groups(bits, group, dtype, zeros=zeros)


def group_inputs(form: GroupFormat, inputs: int) -> int:
    return 32 * form.span * form.repeats or inputs


def random_integers(
    form: GroupFormat, outputs: int, inputs: int, *, signed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator, groups = torch.Generator().manual_seed(0), -(-inputs // group_inputs(form, inputs))
    least = -(1 << form.bits - 1) if signed else 0
    limits, dtype = (least, least + (1 << form.bits)), torch.int8 if signed else torch.uint8
    values = torch.randint(*limits, (outputs, inputs), generator=generator).to(dtype)
    scales = torch.randn(outputs, groups, generator=generator).to(form.scale_dtype)
    zeros = torch.randint(*limits, (outputs, groups), generator=generator).to(dtype) if form.zeros else None
    return values, scales, zeros


@pytest.mark.parametrize(
    ("form", "outputs", "inputs"),
    paired(integer_formats(), [(19, 1280), (16, 96), (3, 40)]),
    ids=lambda value: getattr(value, "name", None),
)
def test_integers_are_scaled(form: GroupFormat, outputs: int, inputs: int) -> None:
    group = group_inputs(form, inputs)
    for signed in (True, False) if form.zeros else (True,):
        values, scales, zeros = random_integers(form, outputs, inputs, signed=signed)
        weight = empty(form, outputs, inputs)
        for first in range(0, outputs, 7):
            rows = slice(first, first + 7)
            weight.write_groups(first, values[rows], scales[rows], None if zeros is None else zeros[rows])

        def spread(of_groups: torch.Tensor) -> torch.Tensor:
            return of_groups.repeat_interleave(group, dim=1)[:, :inputs]

        whole = values.int() - (0 if zeros is None else spread(zeros.int()))
        assert torch.equal(weight.dense(), spread(scales.float()) * whole)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("group", [32, 64, 256, 4096])
def test_values_of_tables_of_16_bits_are_scaled(name: str, group: int) -> None:
    form = table_groups(name, group)
    values, scales, _ = random_integers(dataclasses.replace(form, zeros=True), 19, 4096, signed=False)
    weight, rounded = (empty(form, 19, 4096, dtype) for dtype in (torch.float32, torch.bfloat16))
    meant = torch.tensor(TABLES[form.table])[values.int()] * scales.repeat_interleave(group, dim=1)
    for each in (weight, rounded):
        each.write_groups(0, values, scales)
        assert torch.equal(each.dense(), meant.to(each.dtype))
    with pytest.raises(ValueError, match="int8 are not of this format"):
        weight.write_groups(0, values.view(torch.int8), scales)


def test_scales_of_mxfp4_are_powers_of_two_from_the_least_to_the_most() -> None:
    raw = torch.zeros(16, 17, dtype=torch.uint8)
    raw[:, 0] = torch.tensor([0, 1, 2, 3, 100, 126, 127, 128, 200, 250, 251, 252, 253, 254, 255, 0])
    raw[:, 1:] = torch.arange(16, dtype=torch.uint8) * 17  # each 4-bit float twice
    weight = empty(FORMATS["mxfp4"], 16, 32)
    assert weight.write_blocks(0, raw).isfinite().all(1).tolist() == [True] * 14 + [False, True]
    known = weight.dense()[:13]  # 12 * 2^126 is more than a float32 can be
    assert torch.equal(known, expected("mxfp4", raw)[:13]) and (known[0] != 0).sum() == 28


@pytest.mark.parametrize("name", QUANTISERS)
def test_blocks_are_written_as_they_were_read(name: str) -> None:
    _, block_inputs, block_bytes = next(each for each in TYPES.values() if each[0] == name)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (5, 3 * block_bytes), dtype=torch.uint8, generator=generator)
    assert torch.equal(blocks_of(name, parts_of(name, raw, 3 * block_inputs)), raw)
    if block_inputs > 32:
        parts = quantise(torch.ones(2, 128), FORMATS[name])
        with pytest.raises(ValueError, match="whole blocks"):
            blocks_of(name, parts)


def test_what_is_not_of_the_format_is_refused() -> None:
    for group in (16, 48, 192, 320, -256):
        with pytest.raises(ValueError, match="groups of"):
            integer_groups(4, group, torch.float16, zeros=False)
    for bits in (1, 7, 16):
        with pytest.raises(ValueError, match="bits"):
            integer_groups(bits, 32, torch.float16, zeros=False)
    form = integer_groups(4, 64, torch.float16, zeros=True)
    values, scales, zeros = random_integers(form, 16, 256, signed=False)
    assert zeros is not None
    weight = empty(form, 16, 256)
    for arguments in (
        (0, values + 1, scales, zeros),
        (0, values, scales.float(), zeros),
        (0, values, scales, None),
        (0, values, scales[:, :3], zeros),
        (0, values, scales, zeros[:, :3]),
        (0, values[:, :255], scales, zeros),
        (1, values, scales, zeros),
        (-1, values[:2], scales[:2], zeros[:2]),
    ):
        with pytest.raises(ValueError, match=r"format|bits|fit|groups"):
            weight.write_groups(*arguments)
    with pytest.raises(ValueError, match="bytes"):
        empty(FORMATS["q4_k"], 4, 256).write_blocks(0, torch.zeros(4, 143, dtype=torch.uint8))
    with pytest.raises(ValueError, match="bytes"):
        empty(FORMATS["q4_k"], 4, 128).write_blocks(0, torch.zeros(4, 72, dtype=torch.uint8))
    with pytest.raises(TypeError, match="q3_k"):
        empty(FORMATS["q3_k"], 4, 256).write(0, torch.zeros(4, 256))
