"""A server that quantises its model while it loads it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests import quire_command
from tests.families import settings_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, load_decoder, make_family_model, make_model
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages
from workers.common.protocol import EXIT_CONFIG

PROMPT = [(5 * i + 2) % 97 for i in range(37)]
COUNT = 24


def greedy(model: Path, format_name: str) -> list[int]:
    """The tokens that a decoder of this process chooses, each after a forward of the whole text."""
    torch.set_num_threads(1)
    decoder = load_decoder(model, pack=True, quantization=format_name)
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
    expected = greedy(model, format_name)
    flags = ["--quantization", format_name, "--device", "cpu", "--kv-pages", "64"]
    with GatewayProcess(model=str(model), flags=flags, self_check=True) as gateway:
        capabilities = gateway.stub.GetCapabilities(pb.GetCapabilitiesRequest())
        assert f"{format_name} weights" in capabilities.executor.products or "torch" in (
            capabilities.executor.products
        )
        info = gateway.stub.GetModelInfo(pb.GetModelInfoRequest()).model
        assert (info.quantization, info.dtype) == (format_name, types_pb2.DATA_TYPE_BF16)
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


def test_experts_are_refused_before_the_port_listens(tmp_path: Path) -> None:
    model = make_family_model(tmp_path, *settings_of("qwen3_moe"))
    flags = ["serve", "--listen", "127.0.0.1:0", "--model", str(model), "--quantization", "q8_0"]
    done = subprocess.run(
        quire_command.command(*flags), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == EXIT_CONFIG
    assert "quantization = q8_0 is not for mixtures of experts yet: leave it out" in done.stderr
