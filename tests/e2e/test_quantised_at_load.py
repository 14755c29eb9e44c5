"""A server that quantises its model while it loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.v1 import types_pb2

from tests.e2e.greedy import chosen_by, chosen_here, decoded
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, load_decoder, make_model
from workers.models.model import BFLOAT16_KV

PROMPT = [(5 * i + 2) % 97 for i in range(37)]
COUNT = 24


# Their numbers, and the self-check: tests/workers/test_quantised_models.py.
@pytest.mark.parametrize("format_name", ["q8_0", pytest.param("q4_0", marks=pytest.mark.thorough)])
def test_its_tokens_are_those_of_the_quantised_model(format_name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, TinyModel(tied=format_name == "q4_0", dtype="bfloat16"))
    expected = chosen_here(model, PROMPT, COUNT, format_name, BFLOAT16_KV)
    flags = ["--quantization", format_name, "--device", "cpu", "--kv-pages", "64"]
    with GatewayProcess(model=str(model), flags=flags) as gateway:
        capabilities = gateway.capabilities()
        assert f"{format_name} weights" in capabilities.executor.products or "torch" in (
            capabilities.executor.products
        )
        info = gateway.model()
        assert (info.quantization, info.dtype) == (format_name, types_pb2.DATA_TYPE_F32)
        assert decoded(gateway, PROMPT, COUNT) == expected


def test_activations_are_not_rounded_if_that_is_asked_for(tmp_path: Path) -> None:
    """By none of the ranks."""
    model = make_model(tmp_path, TinyModel(intermediate_size=128))
    decoder = load_decoder(model, pack=True, quantization="q4_0", rounds_rows=False)
    expected = chosen_by(decoder, PROMPT, COUNT, BFLOAT16_KV)
    flags = ["--quantization", "q4_0", "--activation-quantization", "none", "--device", "cpu"]
    with GatewayProcess(model=str(model), flags=[*flags, "--tensor-parallel", "2"]) as gateway:
        capabilities = gateway.capabilities()
        products = capabilities.executor.products
        assert "(q4_0 weights, float32 inputs, float32 sums)" in products or "torch" in products
        assert decoded(gateway, PROMPT, COUNT) == expected
