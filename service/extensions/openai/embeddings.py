"""OpenAI's /v1/embeddings; and rerank and score, as in the APIs of Jina, Cohere and vLLM.

The score of two texts is the cosine of their embeddings; or, if the model is a cross-encoder
(`cross_encoder`), the probability of "yes".
"""

from __future__ import annotations

import base64
import json
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.v1 import runner_pb2
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from service.api.server_state import ServerState
from service.errors import QuireError
from service.extensions.openai.bodies import BodyReader
from service.extensions.openai.cross_encoder import CrossEncoder
from service.extensions.openai.errors import of_request
from service.extensions.openai.fields import Fields, array, bad_field, boolean, integer, string, unsupported
from service.extensions.openai.generation import JSON, ForwardContext, ResponseBody, until_disconnected
from service.extensions.openai.models import Models
from service.extensions.openai.requests import IGNORED, model_name, priority_of, prompts
from service.runtimes.embedding import MAX_INPUTS, Embedder

# The parts of a JSON text. Other tasks run between them; an empty part follows work that takes long.
Pieces: TypeAlias = Iterator[str]
# Makes the answer of the embeddings and the scores of the pairs.
Answer: TypeAlias = Callable[[Sequence[runner_pb2.Embedding], Iterable[float]], Pieces]
_FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A valid request, not yet checked against the model.

    Attributes:
        names: The request's field that has each input.
        answer: Makes the answer.
        pairs: The indexes of the inputs that are compared.
    """

    embed: runner_pb2.EmbedRequest
    names: Sequence[str]
    answer: Answer
    pairs: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, eq=False)
class EmbeddingHandler:
    """The ASGI application of one of the routes, depending on `parse`."""

    parse: Callable[[Fields, Models], EmbeddingRequest]
    models: Models
    state: ServerState
    embedder: Embedder
    cross_encoder: CrossEncoder
    body_reader: BodyReader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises QuireError."""
        async with self.body_reader.read(Request(scope, receive)) as (value, _):
            await until_disconnected(receive, self._handle(value, send))

    async def _handle(self, value: object, send: Send) -> None:
        await self.state.first_worker(None)
        request = self.parse(Fields(value), self.models)
        found: Sequence[runner_pb2.Embedding]
        scores: Iterable[float]
        with ForwardContext() as context:
            try:
                if request.pairs and self.cross_encoder.is_served:
                    found, scores = await self.cross_encoder.judge(request.embed, request.pairs, context)
                else:
                    found = (await self.embedder.embed(request.embed, context)).embeddings
                    scores = (_cosine(found[one], found[other]) for one, other in request.pairs)
            except QuireError as error:
                raise of_request(error, lambda field: _param(field, request)) from None
            body = ResponseBody(send, [JSON])
            await body.write(request.answer(found, scores))
            await body.end()


def embeddings(fields: Fields, models: Models) -> EmbeddingRequest:
    """Parses a request to /v1/embeddings. Raises InvalidArgument, and whatever `Models.resolve` raises."""
    embed, model, max_tokens = _embed(fields, models)
    given = prompts(fields.raw("input"), max_tokens, "input", MAX_INPUTS)
    for text in given:
        if isinstance(text, str):
            embed.inputs.add(text=text)
        else:
            embed.inputs.add().tokens.token_ids.extend(text)
    if (dimensions := fields.get("dimensions", integer, 1, (1 << 32) - 1)) is not None:
        embed.dimensions = dimensions
    embed.unnormalized = fields.get("normalize", boolean) is False
    encoding = fields.get("encoding_format", string) or "float"
    if encoding not in _FORMATS:
        raise bad_field("encoding_format", f"must be {' or '.join(_FORMATS)}")
    fields.refuse_others(IGNORED, {"add_special_tokens": True})
    is_list = isinstance(fields.raw("input"), list) and not isinstance(fields.raw("input")[0], int)
    names = [f"input[{index}]" if is_list else "input" for index in range(len(given))]

    def answer(found: Sequence[runner_pb2.Embedding], _: Iterable[float]) -> Pieces:
        yield f'{{"object":"list","model":{json.dumps(model)},"data":['
        for index, each in enumerate(found):
            vector = json.dumps(_base64(each.values)) if encoding == "base64" else _numbers(each.values)
            comma = "," if index else ""
            yield f'{comma}{{"object":"embedding","index":{index},"embedding":{vector}}}'
        yield f'],"usage":{json.dumps(_usage(found))}}}'

    return EmbeddingRequest(embed, names, answer)


def rerank(fields: Fields, models: Models) -> EmbeddingRequest:
    """Parses a request to /v1/rerank: sorts documents by their score with a query. Raises as `embeddings`."""
    embed, model, _ = _embed(fields, models)
    documents = [
        _document(each, f"documents[{index}]")
        for index, each in enumerate(array(fields.raw("documents"), "documents", MAX_INPUTS - 1))
    ]
    if not documents:
        raise bad_field("documents", "must have at least one entry")
    texts = [fields.required("query"), *documents]
    embed.inputs.extend(runner_pb2.EmbedInput(text=text) for text in texts)
    most = fields.get("top_n", integer, 0, (1 << 32) - 1) or len(documents)
    with_documents = fields.get("return_documents", boolean) is not False
    fields.refuse_others(IGNORED)
    names = ["query", *(f"documents[{index}]" for index in range(len(documents)))]

    def answer(found: Sequence[runner_pb2.Embedding], each_score: Iterable[float]) -> Pieces:
        scores = list[float]()
        for each in each_score:
            scores.append(each)
            yield ""
        yield f'{{"id":"rerank-{uuid.uuid4().hex}","model":{json.dumps(model)},"results":['
        for place, index in enumerate(sorted(range(len(scores)), key=lambda at: -scores[at])[:most]):
            document = {"document": {"text": documents[index]}} if with_documents else {}
            result = {"index": index, **document, "relevance_score": scores[index]}
            yield ("," if place else "") + json.dumps(result)
        yield f'],"usage":{json.dumps(_usage(found))}}}'

    return EmbeddingRequest(embed, names, answer, [(0, index) for index in range(1, len(texts))])


def score(fields: Fields, models: Models) -> EmbeddingRequest:
    """Parses a request to /score: scores one text with each of a list, or the pairs of two lists."""
    embed, model, _ = _embed(fields, models)
    left, right = (_texts(fields, name) for name in ("text_1", "text_2"))
    if len(left) not in (1, len(right)):
        raise bad_field("text_1", "must be one text, or as many as text_2")
    fields.refuse_others(IGNORED)
    embed.inputs.extend(runner_pb2.EmbedInput(text=text) for text in (*left, *right))
    names = [f"text_1[{index}]" for index in range(len(left))]
    names += [f"text_2[{index}]" for index in range(len(right))]

    def answer(found: Sequence[runner_pb2.Embedding], scores: Iterable[float]) -> Pieces:
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        yield json.dumps({**head, "model": model})[:-1] + ',"data":['
        for index, similarity in enumerate(scores):
            comma = "," if index else ""
            yield comma + json.dumps({"index": index, "object": "score", "score": similarity})
        yield f'],"usage":{json.dumps(_usage(found))}}}'

    pairs = [(index % len(left), len(left) + index) for index in range(len(right))]
    return EmbeddingRequest(embed, names, answer, pairs)


def _embed(fields: Fields, models: Models) -> tuple[runner_pb2.EmbedRequest, str, int]:
    """The Embed without its inputs, the model's name, and the most tokens of a prompt. Used by all routes."""
    model = models.resolve(model_name(fields), needs_text=False)
    if not model.is_local:
        raise unsupported("model", "a provider's models make no embeddings here")
    embed = runner_pb2.EmbedRequest(
        adapter_id=model.adapter_id,
        priority=priority_of(fields),
        cache_salt=fields.get("cache_salt", string) or "",
    )
    return embed, model.adapter_id or model.model_id, model.max_tokens


def _texts(fields: Fields, name: str) -> list[str]:
    given = fields.raw(name)
    texts = [given] if isinstance(given, str) else array(given, name, MAX_INPUTS // 2)
    if not texts:
        raise bad_field(name, "must have at least one entry")
    return [string(text, f"{name}[{index}]") for index, text in enumerate(texts)]


def _document(given: object, path: str) -> str:
    """A text, or an object with one, as Jina's clients send."""
    if isinstance(given, str):
        return string(given, path)
    fields = Fields(given, path)
    text = fields.required("text")
    fields.refuse_others()
    return text


def _param(field: str, request: EmbeddingRequest) -> str:
    """The request's field for a field of Embed that an error names."""
    head, _, rest = field.partition("]")
    if not head.startswith("inputs["):
        return field
    index = int(head.removeprefix("inputs["))
    return request.names[index] + rest.removeprefix(".text").removeprefix(".tokens").removeprefix(
        ".token_ids"
    )


def _cosine(first: runner_pb2.Embedding, second: runner_pb2.Embedding) -> float:
    """The cosine of two vectors of length 1."""
    return sum(one * other for one, other in zip(first.values, second.values, strict=True))


def _numbers(values: Sequence[float]) -> str:
    # 9 digits are enough for float32.
    return f"[{','.join(f'{value:.9g}' for value in values)}]"


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _usage(found: Sequence[runner_pb2.Embedding]) -> dict[str, Any]:
    tokens = sum(each.input_tokens for each in found)
    cached = sum(each.cached_tokens for each in found)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
