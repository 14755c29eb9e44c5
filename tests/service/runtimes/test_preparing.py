"""Items are checked before work is done for them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from quire.v1 import runner_pb2, types_pb2

from service.config import Config
from service.errors import InvalidArgument
from service.runtimes.preparing import ItemPreparer
from service.runtimes.sample import Sample
from tests.service.served import state_of
from workers.common import worker_pb2


class Text:
    """Of a model without a tokenizer. Nothing may be encoded."""

    async def tokenizer(self) -> None:
        return None

    async def encode_chat(self, *_: object, **__: object) -> None:
        pytest.fail("a template is rendered")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sampling": types_pb2.SamplingParams(temperature=-1.0)}, "BAD_SAMPLING"),
        ({"constraint": runner_pb2.Constraint(mask=types_pb2.TokenMask(packed=b""))}, "BAD_MASK"),
        ({"stop": ["x"]}, "BAD_STOP"),
    ],
)
async def test_no_prompt_is_encoded_for_an_item_that_is_refused(fields: dict[str, Any], reason: str) -> None:
    """Before, its template was rendered first, which may take seconds."""
    ready = worker_pb2.WorkerReady(model=types_pb2.ModelDescription(vocab_size=100, max_seq_len=100))
    preparer = ItemPreparer(state_of(Config(), ready), cast(Any, Text()))
    chat = runner_pb2.Chat(messages=[runner_pb2.ChatMessage(content="x")])
    with pytest.raises(InvalidArgument) as refused:
        await preparer.prepare(runner_pb2.ExecuteItem(item_id="a", chat=chat, **fields), None)
    assert refused.value.reason == reason


@pytest.mark.parametrize("kind", ["allowed", "forbidden"])
async def test_a_long_list_of_tokens_is_sent_as_bits(kind: str) -> None:
    """With each token. Lists of all of a large vocabulary took tens of milliseconds for each."""
    size, ids = 10_001, [7, 9_999, *range(20, 10_000, 2), 7]
    ready = worker_pb2.WorkerReady(
        model=types_pb2.ModelDescription(vocab_size=size, max_seq_len=100),
        executor=types_pb2.ExecutorCapabilities(kv_capacity_tokens=100),
    )
    item = runner_pb2.ExecuteItem(item_id="a", tokens_only=True, tokens=runner_pb2.TokenPrompt(token_ids=[1]))
    getattr(item.constraint.mask, kind).ids.extend(ids)
    prepared = await ItemPreparer(state_of(Config(), ready), cast(Any, Text())).prepare(item, None)
    sent = worker_pb2.ForwardOptions.FromString(prepared.options(Sample(prepared.spec, 0)))
    bits = int.from_bytes(sent.output.mask.packed, "little")
    found = {token for token in range(size) if bits >> token & 1}
    assert found == ({*ids} if kind == "allowed" else {*range(size)} - {*ids})
    getattr(item.constraint.mask, kind).ids[:] = ids[:3]
    prepared = await ItemPreparer(state_of(Config(), ready), cast(Any, Text())).prepare(item, None)
    sent = worker_pb2.ForwardOptions.FromString(prepared.options(Sample(prepared.spec, 0)))
    assert [*getattr(sent.output.mask, kind).ids] == ids[:3]
