"""Items are checked before work is done for them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from quire.v1 import runner_pb2, types_pb2

from service.config import Config
from service.errors import InvalidArgument
from service.runtimes.preparing import ItemPreparer
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
