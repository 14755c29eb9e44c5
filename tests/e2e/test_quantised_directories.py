"""A server with a model whose files have it quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire.v1 import executor_pb2 as pb

from tests import quantised_directories as make
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, load_decoder, make_model
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages

PROMPT = [(5 * i + 2) % 97 for i in range(37)]
COUNT = 24


def greedy(model: Path) -> list[int]:
    """The tokens that a decoder of this process chooses, each after a forward of the whole text."""
    torch.set_num_threads(1)
    decoder = load_decoder(model, pack=True)
    text = list(PROMPT)
    for _ in range(COUNT):
        inputs = new_packer(1).pack([Item(HandSequence(), text, [len(text) - 1])])
        logits = decoder.logits(decoder.forward(inputs, poisoned_pages(decoder)))
        text.append(int(logits[0].argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda directory: make.gptq(directory, ordered=True), "int4"),
        (make.awq, "int4"),
        (make.float8, "float8"),
    ],
    ids=["gptq", "awq", "float8"],
)
def test_its_tokens_are_those_of_the_model(
    write: Callable[[Path], make.Tensors], says: str, tmp_path: Path
) -> None:
    """It has proved itself before: with the self-check, which is not skipped."""
    model = make_model(tmp_path, TinyModel(dtype="bfloat16"))
    write(model)
    expected = greedy(model)
    with GatewayProcess(model=str(model), flags=["--kv-pages", "64"], self_check=True) as gateway:
        info = gateway.stub.GetModelInfo(pb.GetModelInfoRequest()).model
        assert info.quantization.startswith(says) and info.backend == "native"
        answer = gateway.stub.Prefill(pb.PrefillRequest(token_ids=PROMPT), timeout=30)
        handle, chosen = answer.kv_cache, [answer.output.token_id]
        while len(chosen) < COUNT:
            request = pb.DecodeRequest(cache_id=handle.cache_id, token_id=chosen[-1], position=handle.seq_len)
            step = gateway.stub.Decode(request, timeout=30)
            handle = step.kv_cache
            chosen.append(step.output.token_id)
        assert "native code agree" in gateway.log()
    assert chosen == expected
