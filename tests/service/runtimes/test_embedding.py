"""What an Embed checks before it makes a Forward of each input."""

from __future__ import annotations

from typing import Any

import pytest
from quire.v1 import runner_pb2, types_pb2

from service.config import Config
from service.errors import InvalidArgument, QuireError
from service.runtimes.embedding import Embedder
from service.text.text_model import TextModel
from tests.service.extensions.openai.test_front import unexpected
from tests.service.served import state_of
from workers.common import worker_pb2


class Context:
    def time_remaining(self) -> None:
        """No deadline."""


@pytest.mark.parametrize("name", ["cache_salt", "adapter_id"])
async def test_what_all_inputs_share_is_checked_before_it_is_copied(name: str) -> None:
    """Otherwise a message of 16 MB would take 32 GB."""
    model = types_pb2.ModelDescription(vocab_size=100, hidden_size=8)
    able = types_pb2.ExecutorCapabilities(kv_capacity_tokens=1000)
    state = state_of(Config(), worker_pb2.WorkerReady(model=model, executor=able))
    embedder = Embedder(state, TextModel(lambda: state.first_ready, lambda: ""), unexpected)
    shared: Any = {name: "x" * 1000}
    request = runner_pb2.EmbedRequest(**shared)
    request.inputs.add().tokens.token_ids.append(1)
    with pytest.raises(QuireError) as caught:
        await embedder.embed(request, Context())
    error = caught.value
    assert (error.field if isinstance(error, InvalidArgument) else error.metadata["field"]) == name
