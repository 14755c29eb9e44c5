"""The memory of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels.packed_pages import PackedKeys, can_pack_width
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.pages import dense
from workers.kv.tensors import KvTensors, LayerKv

UNIFORM = (LayerKv(2, 8, 8),) * 3
# Keys and values of one width and of two, layers that differ, one width of keys here and of values there.
MIXED = (LayerKv(2, 8, 8), LayerKv(2, 24, 8), LayerKv(1, 8, 16), LayerKv(2, 8, 8))
SHAPES = pytest.mark.parametrize("layers", [UNIFORM, MIXED], ids=["uniform", "mixed"])


def new_kv(
    layers: Sequence[LayerKv] = UNIFORM, num_pages: int = 40, dtype: torch.dtype = torch.float32
) -> KvTensors:
    kv = KvTensors(layers, num_pages=num_pages, page_size=16, dtype=dtype)
    for index in range(kv.num_layers):
        for pages in kv.layer(index):
            pages.data.copy_(torch.randn(pages.shape))
    return kv


def test_one_piece_of_memory_where_all_is_alike() -> None:
    """Else a copy of pages would be one for each layer."""
    kv = new_kv()
    storages = {pages.data.untyped_storage().data_ptr() for index in range(3) for pages in kv.layer(index)}
    assert len(storages) == 1


@SHAPES
@pytest.mark.parametrize("count", [1, 16, 17, 19])
def test_copy_copies_all_layers_and_nothing_else(layers: Sequence[LayerKv], count: int) -> None:
    kv = new_kv(layers)
    before = [[pages.data.clone() for pages in kv.layer(index)] for index in range(kv.num_layers)]
    pairs = [(3 if i % 2 else i, 39 - i) for i in range(count)]  # one source occurs often
    kv.copy_pages(pairs)
    for index in range(kv.num_layers):
        for pages, old in zip(kv.layer(index), before[index], strict=True):
            expected = old.clone()
            for source, destination in pairs:
                expected[destination] = old[source]
            assert torch.equal(pages.data, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(8, 8), (16, 32), (16, 512)])
def test_tokens_move_in_all_layers(widths: tuple[int, int], dtype: torch.dtype) -> None:
    """Chains, of which all sources are read first; of packed layers, plain ones, and one of each."""
    need_compiled()
    kv = new_kv([LayerKv(2, width, width) for width in widths], num_pages=3, dtype=dtype)
    for index, width in enumerate(widths):
        packs = dtype is not torch.float16 and can_pack_width(width)
        assert isinstance(kv.layer(index)[0], PackedKeys) == packs
    before = [[dense(pages) for pages in kv.layer(index)] for index in range(2)]
    pairs = [(5, 4), (6, 5), (17, 6), (47, 32)]
    kv.move_slots(pairs)
    kv.move_slots([])
    for index in range(2):
        for pages, old in zip(kv.layer(index), before[index], strict=True):
            expected = old.flatten(0, 1).clone()
            for source, destination in pairs:
                expected[destination] = old.flatten(0, 1)[source]
            assert torch.equal(dense(pages).flatten(0, 1), expected)
    for pair in ((-1, 3), (3, 48)):
        with pytest.raises(ValueError, match=r"slot must be in 0\.\.47"):
            kv.move_slots([pair])


def test_quantised_pages() -> None:
    """They take the bytes that are said, and are refused where there are no kernels for them."""
    need_compiled()
    layers = [LayerKv(2, 32, 48)] * 3
    kv = KvTensors(layers, num_pages=40, page_size=16, dtype=torch.bfloat16, quantised=True)
    taken_bytes = sum(pages.data.nbytes for index in range(3) for pages in kv.layer(index))
    assert kv.bytes_per_page == taken_bytes // 40 == 3 * 16 * 2 * (32 + 4 + 48 + 4)
    assert sum(map(len, kv.page_views(7))) == kv.bytes_per_page
    for layer, dtype in ((LayerKv(2, 8, 16), torch.bfloat16), (LayerKv(2, 16, 16), torch.float16)):
        with pytest.raises(ValueError, match="there are no kernels for such pages of"):
            KvTensors([layer], num_pages=2, page_size=16, dtype=dtype, quantised=True)


def test_copy_refuses_what_depends_on_order() -> None:
    kv = new_kv()
    kv.copy_pages([])
    for pairs in ([(1, 2), (3, 2)], [(1, 2), (2, 3)], [(4, 4)]):
        with pytest.raises(ValueError, match="a destination must occur once, and not as a source"):
            kv.copy_pages(pairs)
    for pairs in ([(0, 40)], [(-1, 3)]):
        with pytest.raises(ValueError, match=r"page must be in 0\.\.39"):
            kv.copy_pages(pairs)


@SHAPES
def test_bytes_of_a_page(layers: Sequence[LayerKv]) -> None:
    kv = new_kv(layers, dtype=torch.bfloat16)
    taken_bytes = sum(pages.data.nbytes for index in range(kv.num_layers) for pages in kv.layer(index))
    assert kv.bytes_per_page == taken_bytes // 40
    assert kv.bytes_per_page == KvTensors.page_bytes(layers, page_size=16, dtype=torch.bfloat16)
