"""A server that quantises its model while it loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.families import settings_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, load_decoder, make_family_model, make_model
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages
from tests.workers.rank_threads import split_model

PROMPT = [(5 * i + 2) % 97 for i in range(37)]
COUNT = 24


def greedy(decoder: Any) -> list[int]:
    """The tokens that a model of this process chooses, each after a forward of the whole text."""
    torch.set_num_threads(1)
    text = list(PROMPT)
    for _ in range(COUNT):
        inputs = new_packer(1).pack([Item(HandSequence(), text, [len(text) - 1])])
        logits = decoder.logits(decoder.forward(inputs, poisoned_pages(decoder)))
        text.append(int(logits[0].argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("format_name", ["q8_0", "q4_0"])
def test_its_tokens_are_those_of_the_quantised_model(format_name: str, tmp_path: Path) -> None:
    """It has proved itself before: with the self-check, which is not skipped."""
    model = make_model(tmp_path, TinyModel(tied=format_name == "q4_0", dtype="bfloat16"))
    expected = greedy(load_decoder(model, pack=True, quantization=format_name))
    assert_served(model, format_name, types_pb2.DATA_TYPE_BF16, expected)


def test_experts_on_two_ranks(tmp_path: Path) -> None:
    """Each quantises its part. Of two ranks' sums there is one order."""
    family, settings = settings_of("qwen3_moe")
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 64}
    model = make_family_model(tmp_path, family, settings | sizes)
    expected = greedy(split_model(model, 2, quantization="q8_0"))
    assert_served(model, "q8_0", types_pb2.DATA_TYPE_F32, expected, "--tensor-parallel", "2")


def assert_served(model: Path, format_name: str, dtype: int, expected: list[int], *more: str) -> None:
    flags = ["--quantization", format_name, "--device", "cpu", "--kv-pages", "64", *more]
    with GatewayProcess(model=str(model), flags=flags, self_check=True) as gateway:
        capabilities = gateway.stub.GetCapabilities(pb.GetCapabilitiesRequest())
        assert f"{format_name} weights" in capabilities.executor.products or "torch" in (
            capabilities.executor.products
        )
        info = gateway.stub.GetModelInfo(pb.GetModelInfoRequest()).model
        assert (info.quantization, info.dtype) == (format_name, dtype)
        answer = gateway.stub.Prefill(pb.PrefillRequest(token_ids=PROMPT), timeout=30)
        handle, chosen = answer.kv_cache, [answer.output.token_id]
        while len(chosen) < COUNT:
            request = pb.DecodeRequest(cache_id=handle.cache_id, token_id=chosen[-1], position=handle.seq_len)
            step = gateway.stub.Decode(request, timeout=30)
            handle = step.kv_cache
            chosen.append(step.output.token_id)
        # Or "agreed", in an earlier start.
        assert "native code agree" in gateway.log()
    assert chosen == expected
