"""What would give a row other bits in other company, planted where models call kernels: each is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention_batch import AttentionBatch
from kernels.attention_reference import paged_attention_reference
from kernels.attention_scoring import Scoring
from tests.families import settings_of
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.pages import dense
from tests.model_factory import load_decoder, make_family_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import random_texts
from workers.models import decoder, experts, layers, linear

# A whole text has more rows, chunks beside others have fewer.
MANY = 64
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TEXTS = random_texts(6, (1, 90, 200))

Breach = Callable[[pytest.MonkeyPatch], None]
BREACHES: list[tuple[Breach, torch.dtype]] = []


def breach(*dtypes: torch.dtype) -> Callable[[Breach], Breach]:
    """In which dtypes it is found. bfloat16 rounds most differences away: there it takes many rows."""

    def add(plant: Breach) -> Breach:
        BREACHES.extend((plant, dtype) for dtype in dtypes)
        return plant

    return add


def replace(patch: pytest.MonkeyPatch, owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Call `other` instead of `name`, with the original before the arguments."""
    original = getattr(owner, name)

    def planted(*args: Any, **options: Any) -> Any:
        options.pop("batch_invariant", None)  # of no consequence on the CPU
        return other(original, *args, **options)

    patch.setattr(owner, name, planted)


def in_halves(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """A product whose sums are those of the first inputs plus those of the last."""
    wide, matrix, half = x.float(), weight.dense().float().T, x.shape[1] // 2
    product: torch.Tensor = wide[:, :half] @ matrix[:half] + wide[:, half:] @ matrix[half:]
    return product.to(x.dtype)


@breach(FLOAT32, BFLOAT16)
def sums_in_an_order_that_depends_on_the_number_of_rows(patch: pytest.MonkeyPatch) -> None:
    def product(original: Any, x: torch.Tensor, weight: Any, bias: Any) -> Any:
        return in_halves(x, weight) if len(x) > MANY and bias is None else original(x, weight, bias)

    replace(patch, linear, "linear", product)


@breach(FLOAT32)
def experts_of_a_single_row_by_torch(patch: pytest.MonkeyPatch) -> None:
    def mixture(original: Any, x: torch.Tensor, gate_up: Any, down: Any, *others: Any, **options: Any) -> Any:
        if len(x) > 1:
            return original(x, gate_up, down, *others, **options)
        plain = (torch.stack([each.dense() for each in packed]) for packed in (gate_up, down))
        return original(x, *plain, *others)

    replace(patch, experts, "experts", mixture)


@breach(FLOAT32)
def the_norm_of_a_single_row_in_two_halves(patch: pytest.MonkeyPatch) -> None:
    def norm(original: Any, x: torch.Tensor, residual: torch.Tensor, weight: Any, eps: float) -> Any:
        if len(x) > 1:
            return original(x, residual, weight, eps)
        wide, half = residual.add_(x).float(), x.shape[1] // 2
        squares = wide[:, :half].square().sum(-1) + wide[:, half:].square().sum(-1)
        unit = wide * torch.rsqrt(squares / x.shape[1] + eps)[:, None]
        return (weight * unit.to(weight.dtype)).to(x.dtype)

    replace(patch, layers, "add_rms_norm", norm)


@breach(FLOAT32, BFLOAT16)
def attention_of_long_chunks_by_another_kernel(patch: pytest.MonkeyPatch) -> None:
    def attend(original: Any, *args: Any, **options: Any) -> Any:
        batch: AttentionBatch = args[3]
        if max(batch.query_lens) <= MANY:
            return original(*args, **options)
        query, k, v = args[:3]
        return paged_attention_reference(query, dense(k), dense(v), batch, Scoring(**options))

    replace(patch, layers, "paged_attention", attend)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has each part that a breach is planted in, and is wide: bfloat16 rounds most differences away."""
    family, settings = settings_of("qwen3_moe with dense layers")
    settings |= {"hidden_size": 192, "intermediate_size": 256, "num_experts": 16, "vocab_size": 499}
    return make_family_model(tmp_path_factory.mktemp("model"), family, settings, seed=7)


@pytest.fixture(scope="module")
def decoders(model: Path) -> dict[torch.dtype, decoder.Decoder]:
    """Without a breach, which is asserted."""
    need_compiled()
    with pytest.MonkeyPatch.context() as patch:
        # One by one, so that a breach can be planted in them.
        patch.setattr(decoder, "compiled", lambda sublayers, *_: list(sublayers))
        loaded = {dtype: load_decoder(model, dtype, pack=True) for dtype in (FLOAT32, BFLOAT16)}
    for each in loaded.values():
        assert_same_bits(each, TEXTS, "none is planted")
    return loaded


@pytest.mark.parametrize(
    ("plant", "dtype"), [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in BREACHES]
)
def test_a_breach_is_found(
    plant: Breach,
    dtype: torch.dtype,
    decoders: dict[torch.dtype, decoder.Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="position"):
        assert_same_bits(decoders[dtype], TEXTS, plant.__name__)
