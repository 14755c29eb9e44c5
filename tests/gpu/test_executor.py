"""LlmExecutor on the device against transformers on the same device."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.in_process import LlmExecutor
from tests.gpu.oracle import Oracle
from tests.gpu.sizes import sized
from tests.kernels.conftest import SELDOM
from tests.model_factory import make_family_model
from workers.executors.memory import StepLimits
from workers.outputs import GREEDY, DataType, OutputSpec, RowOutput

torch.set_num_threads(1)

VOCAB = 331
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # a width that there are CUDA kernels for
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# A dense model, a mixture of experts, one with two kinds of layers, windows, and norms on both sides, and one
# with latent attention, groups of experts and shared ones.
MODELS = {
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 80,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "head_dim": 16,  # as the library has it: of what is rotated
        "v_head_dim": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "gemma3_text": {"sliding_window": 24, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64},
}
# Longer than a window.
TEXT, GREEDY_TOKENS = sized(120, 48), sized(64, 24)
WITH_LOGITS = OutputSpec(logits=DataType.F32)
# float32 against float32, in another order of summation: the bound of tests/e2e/test_parity_machine.py.
MAX_RELATIVE_ERROR = 1e-4


# Without a GPU one of them shows that these tests run; tests/workers/test_families.py compares all there.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "qwen3_moe" else SELDOM) for name in MODELS],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind."""
    return make_family_model(
        tmp_path_factory.mktemp("model"), request.param, {**SIZES, **MODELS[request.param]}
    )


def load(
    directory: Path, device: torch.device, dtype: str = "float32", *, cuda_graphs: bool = True
) -> LlmExecutor:
    limits = StepLimits(max_tokens=256, max_items=8, cuda_graphs=cuda_graphs)
    return LlmExecutor.load(directory, dtype=dtype, device=device, kv_pages=128, limits=limits)


def random_tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(count)]


def as_tensor(outputs: list[RowOutput]) -> torch.Tensor:
    rows = [np.frombuffer(output.logits or b"", dtype="<f4") for output in outputs]
    return torch.from_numpy(np.stack(rows))


def all_rows(executor: LlmExecutor, text: list[int]) -> torch.Tensor:
    """Logits of every position: of the first half from a prefill and a verify, of the others from decodes."""
    half = len(text) // 2
    outputs = [executor.prefill(1, text[:1], WITH_LOGITS)]
    outputs += executor.forward_verify(1, text[1:half], WITH_LOGITS)[0]
    outputs += [executor.decode(1, token, WITH_LOGITS) for token in text[half:]]
    executor.release_cache(1)
    return as_tensor(outputs)


def test_logits_in_float32(directory: Path, device: torch.device) -> None:
    text = random_tokens(1, TEXT)
    expected = Oracle(directory, device).logits(text)
    error = (all_rows(load(directory, device), text) - expected).abs().max() / expected.abs().max()
    assert error < MAX_RELATIVE_ERROR


def test_bfloat16_errs_no_more_than_transformers(directory: Path, device: torch.device) -> None:
    """Both round differently; against float32 ours may err at most twice as much.

    In the middle of the rows: a router between two experts may take another one, which changes a row wholly.
    """
    text = random_tokens(2, TEXT)
    exact = Oracle(directory, device).logits(text)
    theirs = (Oracle(directory, device, torch.bfloat16).logits(text) - exact).abs().mean(1)
    ours = (all_rows(load(directory, device, "bfloat16"), text) - exact).abs().mean(1)
    assert ours.median() <= 2 * theirs.median()


def test_greedy_tokens_are_identical(directory: Path, device: torch.device) -> None:
    oracle, executor = Oracle(directory, device), load(directory, device)
    prompts = [random_tokens(3, 5), random_tokens(4, 33), random_tokens(5, 64)]
    outputs = executor.batch_prefill([(key, prompt, GREEDY) for key, prompt in enumerate(prompts)])
    texts = [[output.token_id] for output in outputs]
    while len(texts[0]) < GREEDY_TOKENS:
        outputs = executor.batch_decode([(key, text[-1], GREEDY) for key, text in enumerate(texts)])
        for text, output in zip(texts, outputs, strict=True):
            text.append(output.token_id)
    assert texts == [oracle.greedy(prompt, GREEDY_TOKENS) for prompt in prompts]
    assert len({token for text in texts for token in text}) > 8, "a model that repeats itself proves little"


@pytest.mark.gpu
@pytest.mark.parametrize(("cuda_graphs", "runner"), [(True, "cuda_graph"), (False, "eager")])
def test_decodes_are_replayed_if_that_is_wanted(
    directory: Path, device: torch.device, cuda_graphs: bool, runner: str
) -> None:
    executor = load(directory, device, cuda_graphs=cuda_graphs)
    executor.warmup()  # where a capture failed, it says "eager" now
    able = executor.capabilities()
    assert (able.runner, [*able.kernels], able.device) == (runner, ["torch", "triton"], "cuda:0")
    assert executor.engine.kv_table.usage().pages_referenced == 0
