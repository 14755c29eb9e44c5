"""What an Embed checks before it makes a Forward of each input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quire.v1 import runner_pb2, types_pb2

from service.auth.authenticator import Authenticator
from service.auth.tokens import Role, new_token
from service.config import Config
from service.errors import QuireError, QuotaExceeded
from service.runtimes.embedding import Embedder
from service.text.text_model import TextModel
from tests.service.extensions.openai.test_front import unexpected
from tests.service.served import state_of
from workers.common import worker_pb2


class Context:
    def time_remaining(self) -> None:
        """No deadline."""


def embedder_of() -> Embedder:
    model = types_pb2.ModelDescription(vocab_size=100, hidden_size=8)
    able = types_pb2.ExecutorCapabilities(kv_capacity_tokens=1000)
    state = state_of(Config(), worker_pb2.WorkerReady(model=model, executor=able))
    return Embedder(state, TextModel(lambda: state.first_ready, lambda: ""), unexpected)


@pytest.mark.parametrize("name", ["cache_salt", "adapter_id"])
async def test_what_all_inputs_share_is_checked_before_it_is_copied(name: str) -> None:
    """Otherwise a message of 16 MB would take 32 GB."""
    embedder = embedder_of()
    shared: Any = {name: "x" * 1000}
    request = runner_pb2.EmbedRequest(**shared)
    request.inputs.add().tokens.token_ids.append(1)
    with pytest.raises(QuireError) as caught:
        await embedder.embed(request, Context())
    error = caught.value
    assert error.field == name


async def test_more_inputs_than_the_rate_allows_at_once_are_refused_before_any_is_computed(
    tmp_path: Path,
) -> None:
    """A retry would be refused, too, so none is advised."""
    token, line = new_token("alice", [Role.CALL])
    (tmp_path / "tokens").write_text(f"[tokens]\n{line}\n[tenants.alice]\nmax_per_s = 2\n")
    authenticator = Authenticator(tmp_path / "tokens", certificates=False)
    authenticator.authenticate("/quire.v1.ModelRunnerService/Embed", [("authorization", f"Bearer {token}")])
    request = runner_pb2.EmbedRequest()
    for _ in range(3):
        request.inputs.add().tokens.token_ids.append(1)
    with pytest.raises(QuotaExceeded, match="max_per_s") as caught:
        await embedder_of().embed(request, Context())
    assert caught.value.retry_after_s is None
