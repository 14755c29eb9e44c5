"""Items, and what is to be embedded, are checked before work is done for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from quire.v1 import runner_pb2, types_pb2

from service.auth.authenticator import Authenticator
from service.auth.tokens import Role, new_token
from service.config import Config
from service.errors import InvalidArgument, QuireError, QuotaExceeded
from service.runtimes.embedding import Embedder
from service.runtimes.preparing import ItemPreparer
from service.runtimes.sample import Sample
from service.text.text_model import TextModel
from tests.service.extensions.openai.served_front import unexpected
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
