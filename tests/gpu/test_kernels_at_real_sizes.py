"""Kernels at the widths of Qwen3-0.6B, 8B and 14B, with thousands of tokens and contexts of 32k.

Layers with recurrent states have those of Qwen3-Next 80B-A3B, Granite 4 H Small and Falcon-H1 7B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kernels.cuda.gated_activation import gated_activation
from kernels.cuda.paged_attention import paged_attention
from kernels.cuda.rms_norm import add_rms_norm, rms_norm
from kernels.cuda.rope_kv_write import rope_kv_write
from kernels.few_rows import NormBefore, few_rows_product
from kernels.few_rows_tiles import MOST_ROWS, tiles_for
from kernels.gated_activation import gated_activation_reference
from kernels.rope import RopeSpec, rope_table
from kernels.rope_kv_write import rope_kv_write_reference
from tests.gpu.sizes import sized
from tests.kernels.attention_case import Item, make_case
from tests.kernels.cuda.poison import assert_rounded, assert_same_roundings, same_bits
from tests.kernels.cuda.test_state_scans_cuda import on, run
from tests.kernels.references import rms_norm64
from tests.kernels.test_state_scans import Drawn, Layer, gated_delta_of, mamba2_of, rows_of, states_of

EPS = 1e-6
# Query and key-value heads of the three models; (1, 1) is of none.
HEADS = sized([(16, 8), (32, 8), (40, 8)], [(2, 1)])
WIDTH = sized(128, 32)
LONG = sized(32_768, 70)
TOKENS = sized(4096, 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


# Long and short decodes, and one that is padded.
DECODES: list[Item] = [(1, LONG), (1, LONG - 5), (1, 1), (1, 0), (1, LONG // 8 + 1)]
# Whole prompts, and decodes before them; tests add a chunk at the end of a long context.
CHUNKS: list[Item] = [(1, LONG // 2), (1, 3), (sized(1000, 9), sized(1000, 9)), (7, sized(3000, 33))]


def check(items: list[Item], device: torch.device, dtype: torch.dtype, **shape: Any) -> None:
    case = make_case(items, device, dtype=dtype, **shape)
    out = paged_attention(case.query, case.k_pages, case.v_pages, case.batch, case.scoring)
    case.check(out, rounds_weights=True, any_order=True)


@DTYPES
@pytest.mark.parametrize("window", [None, sized(4096, 20)])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attention_at_32k(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = sized(512 if dtype is torch.float32 else 2048, 20)
    for items in (DECODES, [*CHUNKS, (tokens, LONG)]):
        check(items, device, dtype, group=heads // kv_heads, kv_heads=kv_heads, width=WIDTH, window=window)


@pytest.mark.parametrize("batch", sized([64, 256], [3]))
def test_decode_attention_of_large_batches(batch: int, device: torch.device) -> None:
    items: list[Item] = [(1, 1 + 37 * index % sized(2048, 40)) for index in range(batch)]
    heads, kv_heads = HEADS[-1]
    check(items, device, torch.bfloat16, group=heads // kv_heads, kv_heads=kv_heads, width=WIDTH)


@pytest.mark.parametrize("width", sized([64, 80, 96, 256], [64]))
def test_other_head_widths(width: int, device: torch.device) -> None:
    longest = sized(5000, 40)
    check([(1, longest), (sized(300, 9), longest)], device, torch.bfloat16, width=width)


@pytest.mark.parametrize("width", sized([1024, 4096, 5120], [64]))
def test_norms(width: int, device: torch.device) -> None:
    x, residual = (torch.randn(TOKENS, width).bfloat16() for _ in range(2))
    weight = torch.randn(width).bfloat16()
    assert_rounded(rms_norm(x.to(device), weight.to(device), EPS), rms_norm64(x, weight, EPS), 2)
    total = residual + x
    on_device = residual.to(device, copy=True)
    normed = add_rms_norm(x.to(device), on_device, weight.to(device), EPS)
    assert torch.equal(on_device.cpu(), total)
    assert_rounded(normed, rms_norm64(total, weight, EPS), 2)


@pytest.mark.parametrize("rows", sized([1, 5, 16], [3]))
@pytest.mark.parametrize(
    ("width", "inner"), sized([(1024, 3072), (4096, 12_288), (5120, 17_408)], [(64, 96)])
)
def test_products_of_few_rows(width: int, inner: int, rows: int, device: torch.device) -> None:
    """The two of an MLP, as the norm, the products, the gate and the sum in float64; twice the same bits."""
    x, added = (torch.randn(rows, columns, device=device).bfloat16() for columns in (width, inner))
    gate_up = (torch.randn(2 * inner, width, device=device) * width**-0.5).bfloat16()
    down = (torch.randn(width, inner, device=device) * inner**-0.5).bfloat16()
    scale = torch.randn(width, device=device).bfloat16()
    squares = torch.zeros(1, MOST_ROWS, device=device)
    squares[0, :rows] = x.float().pow(2).sum(1)
    for tiles in tiles_for(torch.bfloat16, "silu"):
        norm = NormBefore(scale, EPS, squares)
        actual, again = (
            few_rows_product(x, gate_up, None, tiles, norm=norm, activation="silu")[0] for _ in range(2)
        )
        both = rms_norm64(x.cpu(), scale.cpu(), EPS).bfloat16().double() @ gate_up.cpu().double().T
        gate, up = both.chunk(2, dim=1)
        torch.testing.assert_close(actual.cpu().double(), gate * gate.sigmoid() * up, rtol=2**-5, atol=2**-5)
        assert torch.equal(actual, again)
    for tiles in tiles_for(torch.bfloat16, None):
        total, again = (few_rows_product(added, down, None, tiles, residual=x.clone())[0] for _ in range(2))
        expected = added.cpu().double() @ down.cpu().double().T + x.cpu().double()
        torch.testing.assert_close(total.cpu().double(), expected, rtol=2**-6, atol=2**-6)
        assert torch.equal(total, again)


@pytest.mark.parametrize("width", sized([3072, 12_288, 17_408], [96]))
def test_gated_activation(width: int, device: torch.device) -> None:
    gate_up = torch.randn(TOKENS, 2 * width).bfloat16()
    actual = gated_activation(gate_up.to(device), "silu")
    assert_same_roundings(actual, gated_activation_reference(gate_up))
    gate, up = gate_up.double().chunk(2, -1)
    assert_rounded(actual, torch.nn.functional.silu(gate) * up, 2)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_rope_kv_write(heads: int, kv_heads: int, device: torch.device) -> None:
    pages = TOKENS // 8 + 1
    qkv = torch.randn(TOKENS, (heads + 2 * kv_heads) * WIDTH).bfloat16()
    qk_norm = (1 + torch.randn(heads + kv_heads, WIDTH) / 10).bfloat16()
    table = rope_table(RopeSpec(theta=1e6), WIDTH, LONG, torch.device("cpu"))
    cos_sin = table[torch.randint(LONG, (TOKENS,))]
    slots = torch.randperm(16 * pages)[:TOKENS]
    empty = torch.full((pages, 16, kv_heads, WIDTH), torch.nan).bfloat16()
    k_expected, v_expected = empty.clone(), empty.clone()
    query = rope_kv_write_reference(qkv, qk_norm, cos_sin, slots, k_expected, v_expected, EPS)
    k_pages, v_pages = (empty.to(device, copy=True) for _ in range(2))
    turned, where = cos_sin.to(device), slots.to(device)
    ours = rope_kv_write(qkv.to(device), qk_norm.to(device), turned, where, k_pages, v_pages, EPS)
    assert_same_roundings(ours, query)
    for mine, theirs in ((k_pages, k_expected), (v_pages, v_expected)):
        written = mine.cpu().flatten(0, 1)  # [slots, K, D]
        assert_same_roundings(written[slots], theirs.flatten(0, 1)[slots])
        assert int(written.isnan().sum()) == written.numel() - TOKENS * kv_heads * WIDTH


RECURRENT = {
    "gated delta": partial(gated_delta_of, adjacent=2, sizes=sized((32, 128, 16, 128), (2, 20, 1, 8))),
    "mamba2": partial(mamba2_of, sizes=sized((128, 64, 1, 128), (2, 12, 1, 8))),
    "mamba2 with wide states": partial(mamba2_of, sizes=sized((24, 128, 1, 256), (2, 12, 1, 16))),
}


@pytest.mark.parametrize("layer_of", RECURRENT.values(), ids=RECURRENT)
def test_layers_with_recurrent_states(
    layer_of: Callable[..., Layer], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside many decodes, as accurate as torch; and in two chunks with the same bits."""
    drawn, dtype, decodes, tokens = Drawn(1), torch.bfloat16, sized(60, 1), sized(1000, 4)
    layer = layer_of(drawn, dtype)
    exact_states = [tensor.to(device) for tensor in states_of(layer, drawn, dtype)]
    states = [tensor.clone() for tensor in exact_states]
    projected = drawn(decodes + tokens, layer.projected).to(device, dtype)
    at = rows_of([1] * decodes + [tokens], [3] * decodes + [-1], [(decodes + tokens, 0)])
    exact = layer.reference(projected, on(str(device), layer.weights), *exact_states, on(str(device), at))
    if device.type == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = run(layer, str(device), projected, states, at)
    # The convolution is rounded once, in both: 2^-8 of a value where they round to different sides.
    assert (found.float() - exact.float()).norm() < 2**-6 * exact.float().norm()
    prompt, half = projected[decodes:], tokens // 2
    first = run(layer, str(device), prompt[:half].contiguous(), states, rows_of([half], [-1], [(half, 1)]))
    rest = rows_of([tokens - half], [1], [(tokens - half, 2)])
    second = run(layer, str(device), prompt[half:].contiguous(), states, rest)
    assert same_bits(torch.cat([first, second]), found[decodes:])
    assert all(same_bits(tensor[0], tensor[2]) for tensor in states)
