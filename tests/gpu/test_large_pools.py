"""Pools beyond what 32 bits can address: more than 2^32 elements of keys, and as many of values."""

from __future__ import annotations

import torch

from kernels.cuda.paged_attention import paged_attention
from kernels.cuda.rope_kv_write import rope_kv_write
from tests.gpu.sizes import sized
from tests.kernels.attention_case import Item, make_case
from tests.kernels.cuda.poison import same_bits
from workers.kv.tensors import KvTensors, LayerKv

KV_HEADS, WIDTH = sized(8, 1), sized(128, 32)
PAGE_ELEMENTS = 16 * KV_HEADS * WIDTH
# The last pages lie past 2^32 elements; small ones, to run the lines, in a rehearsal.
FAR_PAGE = sized((1 << 32) // PAGE_ELEMENTS, 40)


def test_attention_reads_far_pages(device: torch.device) -> None:
    items: list[Item] = [(1, sized(1500, 33)), (1, 5), (sized(200, 6), sized(700, 20))]
    case = make_case(items, device, kv_heads=KV_HEADS, width=WIDTH, dtype=torch.bfloat16, first_page=FAR_PAGE)
    out = paged_attention(case.query, case.k_pages, case.v_pages, case.batch, case.scoring)
    case.check(out, rounds_weights=True)


def test_keys_and_values_are_written_far(device: torch.device) -> None:
    """As near, so far: the same tokens in the first and in the last page."""
    tokens, heads = 16, 2 * KV_HEADS
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * KV_HEADS) * WIDTH, device=device, generator=generator).bfloat16()
    cos_sin = torch.rand(tokens, WIDTH, device=device, generator=generator)
    shape = (FAR_PAGE + 1, 16, KV_HEADS, WIDTH)
    k_pages, v_pages = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    near = torch.arange(tokens, device=device)
    for slots in (near, near + 16 * FAR_PAGE):
        rope_kv_write(qkv, None, cos_sin, slots, k_pages, v_pages, 1e-6)
    for pages in (k_pages, v_pages):
        assert pages[0].any() and same_bits(pages[0], pages[FAR_PAGE])
        assert not pages[1].any() and not pages[FAR_PAGE - 1].any()


def test_far_pages_are_copied(device: torch.device) -> None:
    kv = KvTensors(
        [LayerKv(KV_HEADS, WIDTH, WIDTH)] * 2,
        num_pages=FAR_PAGE // 2,
        page_size=16,
        dtype=torch.bfloat16,
        device=device,
    )
    last = kv.num_pages - 1
    for layer in range(2):
        for index, pages in enumerate(kv.layer(layer)):
            pages.data[[0, 1, last]] = 0
            pages.data[last] = 1 + 2 * layer + index
    kv.copy_pages([(last, 0)])
    for layer in range(2):
        for index, pages in enumerate(kv.layer(layer)):
            assert (pages.data[0] == 1 + 2 * layer + index).all() and not pages.data[1].any()
