"""Latent attention, its routing and its shared experts with each kernel of a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels import gpu_format
from kernels.head_products import head_products
from kernels.latent_rope_kv_write import latent_rope_kv_write
from tests.families import settings_of
from tests.gpu.sizes import FirstTiles
from tests.kernels.conftest import INTERPRETED
from tests.kernels.cuda import test_batch_invariance_cuda
from tests.model_factory import hf_logits, make_family_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import new_packer, poisoned_pages, random_texts, rows_in_chunks, rows_of_trees
from workers.models.active_kernels import check_cuda_kernels
from workers.models.decoder import Decoder
from workers.models.weights import load_planned, plan_load

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="of a GPU: tests/gpu/test_graphs.py")
products_of_rows = test_batch_invariance_cuda.products_of_rows
# Few programs: each takes milliseconds in the interpreter. Keys are of a width that pages may have on a CPU.
SMALL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """All is in the memory of the CPU as in a GPU's, and computed by its kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_format, "is_gpu", lambda _: True)
        patch.setattr(torch.Tensor, "is_cuda", True)
        yield


# Queries with a latent and without, pairs that are adjacent or not, and each way of routing. For the others
# there are tests without a model, below and in test_routing_cuda.py.
@pytest.fixture(
    params=[
        "deepseek_v3",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("deepseek_v2", "glm4_moe_lite")),
    ]
)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model_type, settings = settings_of(request.param)
    layers = {"mlp_layer_types": ["dense", "sparse"]} if "mlp_layer_types" in settings else {}
    return make_family_model(tmp_path, model_type, settings | SMALL | layers, seed=3)


def load(directory: Path) -> Decoder:
    """To be called, and used, as on a GPU."""
    decoder = load_planned(plan_load(directory, "float32"))[0]
    decoder.packs_kv = False
    decoder.fuse_few_rows(FirstTiles(lambda _: 0.0))
    return decoder


def test_weights_are_planned_for_a_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests have all in the CPU's memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    plan = plan_load(directory, "float32", "cuda")
    check_cuda_kernels(plan.config)
    assert plan.device.type == "cuda"


def test_logits_are_those_of_transformers(directory: Path) -> None:
    """Of prompts and decodes in chunks beside each other, and of trees."""
    texts = random_texts(5, (20, 5))
    with as_on_a_gpu():
        decoder = load(directory)
        kv = poisoned_pages(decoder)
        chunks = rows_in_chunks(decoder, texts, kv, new_packer(1), random.Random(2))
        paths = rows_of_trees(decoder, poisoned_pages(decoder), new_packer(6))
    for text, rows in zip(texts, chunks, strict=True):
        expected = hf_logits(directory, text)
        for (_, position), row in rows.items():
            torch.testing.assert_close(row, expected[position], rtol=1e-4, atol=1e-4)
    for path, found in paths:
        expected = hf_logits(directory, path)[-len(found) :]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("directory", ["deepseek_v3"], indirect=True)
def test_a_row_has_the_same_bits_in_any_company(directory: Path) -> None:
    with as_on_a_gpu():
        decoder = load(directory)
        decoder.batch_invariant = True
        assert_same_bits(decoder, random_texts(6, (1, 12)), 4)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_written_and_rotated_is_as_in_torch(
    dtype: torch.dtype, rotates: bool, interleaved: bool
) -> None:
    """Of widths that fill no tile, in rows beside others, and with a token that has no slot."""
    tokens, heads, latent, rotated, plain = 5, 3, 40, 12, 9
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(tokens, 7 + latent + rotated, generator=generator).to(dtype)
    queries = torch.randn(tokens, heads, plain + rotated, generator=generator).to(dtype)
    norm = torch.rand(latent, generator=generator).to(dtype)
    angles = torch.randn(tokens, rotated // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1) if rotates else None
    slots = torch.tensor([17, -1, 0, 33, 5])

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pages = [torch.full((3, 16, 1, latent + rotated), 7.0, dtype=dtype) for _ in range(2)]
        told = projected[:, 7:], norm, cos_sin, slots
        query = latent_rope_kv_write(told[0], queries, *told[1:], pages[0], 1e-6, interleaved=interleaved)
        assert query is not None
        nothing = latent_rope_kv_write(told[0], None, *told[1:], pages[1], 1e-6, interleaved=interleaved)
        assert nothing is None and torch.equal(*pages)
        return query[..., latent:], pages[0], query

    expected = run()
    with as_on_a_gpu():
        found = run()
    for ours, exact in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, exact)
    assert found[2].shape == expected[2].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_products_of_heads_are_those_of_float64(dtype: torch.dtype) -> None:
    """Of a part of wider rows into a part of wider rows, whose rest stays."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(70, 3, 50, generator=generator).to(dtype)[..., :33]
    weights = torch.randn(3, 140, 33, generator=generator).to(dtype)
    wide = torch.full((70, 3, 150), 7.0, dtype=dtype)
    with as_on_a_gpu():
        alone = head_products(x[5:6], weights)
        head_products(x, weights, out=wide[..., :140])
    exact = torch.einsum("thi,hoi->tho", x.double(), weights.double())
    torch.testing.assert_close(
        wide[..., :140].double(), exact, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-5
    )
    assert torch.equal(wide[5:6, :, :140], alone) and (wide[..., 140:] == 7).all()
