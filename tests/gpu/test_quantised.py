"""Quantised models on the device, beside the same models on the CPU; in a rehearsal both are on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.in_process import LlmExecutor
from tests.gpu.sizes import sized
from tests.gpu.test_executor import SIZES, WITH_LOGITS, all_rows, random_tokens
from tests.kernels.conftest import INTERPRETED
from tests.model_factory import make_family_model
from workers.executors.memory import StepLimits

torch.set_num_threads(1)

# Rows of whole super-blocks. Fused projections are of two formats with q4_k_m.
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 512}
# So few that the first half of a text is many rows for each expert, and a decode is few.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES = {
    "qwen3": WIDE,
    "qwen3_moe": WIDE | EXPERTS | {"num_experts": 3},
    "gpt_oss": WIDE | EXPERTS | {"num_local_experts": 3, "sliding_window": 8},
}
MODELS = pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("qwen3", "q8_0"),
        ("qwen3", "q4_k_m"),
        *(
            # In a rehearsal the CPU runs all of them.
            pytest.param(family, name, marks=pytest.mark.thorough if INTERPRETED else ())
            for family, name in (("qwen3_moe", "q4_k_m"), ("gpt_oss", "q8_0"))
        ),
    ],
    indirect=["directory"],
)
TEXT = sized(60, 24)
# The CPU rounds what projections multiply to 8 bits, which a GPU does not.
MAX_RELATIVE_ERROR = 0.05


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family that is not quantised."""
    return make_family_model(tmp_path_factory.mktemp("model"), request.param, FAMILIES[request.param])


def load(
    directory: Path, device: torch.device, name: str, dtype: str, *, batch_invariant: bool = False
) -> LlmExecutor:
    limits = StepLimits(max_tokens=256, max_items=8)
    return LlmExecutor.load(
        directory,
        dtype=dtype,
        device=device,
        kv_pages=128,
        limits=limits,
        quantization=name,
        batch_invariant=batch_invariant,
    )


@MODELS
def test_logits_are_near_those_of_the_cpu(name: str, directory: Path, device: torch.device) -> None:
    """In float32. The self-check of the load has compared both with the library's code, more closely."""
    text = random_tokens(1, TEXT)
    on_device = load(directory, device, name, "float32")
    assert on_device.info().quantization
    ours = all_rows(on_device, text)
    theirs = all_rows(load(directory, torch.device("cpu"), name, "float32"), text)
    assert (ours - theirs).norm(dim=1).div(theirs.norm(dim=1)).median() < MAX_RELATIVE_ERROR


@pytest.mark.skipif(INTERPRETED, reason="of the CPU: tests/workers/test_quantised_models.py")
@MODELS
def test_bits_do_not_depend_on_the_batch(name: str, directory: Path, device: torch.device) -> None:
    executor = load(directory, device, name, "bfloat16", batch_invariant=True)
    texts = [random_tokens(seed, length) for seed, length in enumerate((3, TEXT, 17))]
    alone = [
        (executor.prefill(key, text, WITH_LOGITS).logits, executor.decode(key, 5, WITH_LOGITS).logits)
        for key, text in enumerate(texts)
    ]
    for key in range(len(texts)):
        executor.release_cache(key)
    prompts = executor.batch_prefill([(key, text, WITH_LOGITS) for key, text in enumerate(texts)])
    decodes = executor.batch_decode([(key, 5, WITH_LOGITS) for key in range(len(texts))])
    assert [(each.logits, other.logits) for each, other in zip(prompts, decodes, strict=True)] == alone
