"""gpt_oss with each kernel of a GPU: sinks, windows, biases of experts, their gate, and experts in MXFP4."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from kernels import gpu_format
from kernels.gpu_experts import GpuExperts
from tests import quantised_directories as make
from tests.families import settings_of
from tests.gpu.sizes import FirstTiles
from tests.kernels.conftest import INTERPRETED
from tests.model_factory import make_family_model
from tests.workers.packing import HandPacker, HandSequence, Item, poison, random_texts
from workers.kv.tensors import KvTensors
from workers.models.decoder import Decoder
from workers.models.experts import Experts
from workers.models.weights import load_planned, plan_load

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="of a GPU: tests/gpu/test_quantised.py")
LENGTHS = (18, 5)
# Few programs: each takes milliseconds in the interpreter.
SMALL = {
    "num_hidden_layers": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "head_dim": 64,
    "vocab_size": 97,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    model_type, settings = settings_of("gpt_oss")
    plain = make_family_model(tmp_path / "plain", model_type, settings | SMALL, seed=3)
    directory = make.in_one_file(plain, tmp_path / "mxfp4")
    make.mxfp4(directory)
    return directory


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, all is in the memory of the CPU as in a GPU's, and computed by its kernels."""

    def begin() -> None:
        monkeypatch.setattr(gpu_format, "is_gpu", lambda _: True)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    return begin


def rows_of(decoder: Decoder, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of all tokens: of prompts together, and then of the last tokens as decodes."""
    kv = KvTensors(decoder.kv_layers, num_pages=12, page_size=16, dtype=decoder.dtype, pack=False)
    poison(kv)
    packer, sequences = (
        HandPacker(16, random.Random(1).sample(range(12), 12)),
        [HandSequence() for _ in texts],
    )
    steps = []
    for part in (slice(0, -1), slice(-1, None)):
        items = [
            Item(sequence, text[part], range(len(text[part])))
            for sequence, text in zip(sequences, texts, strict=True)
        ]
        logits = decoder.logits(decoder.forward(packer.pack(items), kv))
        steps.append(torch.split(logits, [len(item.tokens) for item in items]))
    return [torch.cat(rows) for rows in zip(*steps, strict=True)]


def assert_logits_are(decoder: Decoder, texts: list[list[int]], expected: list[torch.Tensor]) -> None:
    for rows, exact in zip(rows_of(decoder, texts), expected, strict=True):
        torch.testing.assert_close(rows, exact, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    return [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]


def test_mxfp4_is_computed_as_the_library_dequantises_it(
    mxfp4: Path, as_on_a_gpu: Callable[[], None]
) -> None:
    texts = random_texts(5, LENGTHS)
    dequantised: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        mxfp4,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    expected = logits_of(dequantised, texts)
    as_on_a_gpu()
    decoder = load_planned(plan_load(mxfp4, "float32"))[0]
    decoder.fuse_few_rows(FirstTiles(lambda _: 0.0))
    body = decoder.layers[0][1].body
    assert isinstance(body, Experts) and isinstance(body.gate_up, GpuExperts)
    assert_logits_are(decoder, texts, expected)
