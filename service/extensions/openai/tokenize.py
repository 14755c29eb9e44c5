"""vLLM's /tokenize and /detokenize, and Anthropic's /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from service.api.server_state import ServerState
from service.auth.authenticator import current_tenant
from service.caches.tenants import counted
from service.errors import InvalidArgument, NoTokenizer, SequenceTooLong
from service.extensions.openai.anthropic_messages import messages
from service.extensions.openai.bodies import BodyReader
from service.extensions.openai.fields import Fields, bad_field, boolean, string, unsupported
from service.extensions.openai.generation import until_disconnected
from service.extensions.openai.item_fields import token_ids
from service.extensions.openai.models import Models, ResolvedModel
from service.extensions.openai.requests import CompletionRequest, chat, model_name
from service.text.text_model import TextModel

# The fields of chats that are allowed here.
_OF_CHATS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """The local model's tokenizer over HTTP."""

    models: Models
    state: ServerState
    text: TextModel

    async def tokenize(self, value: object) -> dict[str, Any]:
        """Tokenizes a text, or messages as the prompt of a chat. Raises QuireError."""
        fields = Fields(value)
        model = await self._model(fields)
        with_names = fields.get("return_token_strs", boolean)
        if fields.has("messages"):
            body = {name: fields.raw(name) for name in _OF_CHATS if fields.has(name)}
            request = chat({"model": model.runtime, **body}, self.models.resolve)
            ids: Sequence[int] = await self._encoded(request)
            fields.refuse_others(neutral={"add_special_tokens": False})
        else:
            prompt = fields.get("prompt", string)
            if prompt is None:
                raise bad_field("prompt", "is required")
            with_special = fields.get("add_special_tokens", boolean) is not False
            fields.refuse_others()
            ids = await self.text.encode(
                prompt, max_tokens=model.max_tokens, add_special_tokens=with_special, field="prompt"
            )
        tokenizer = await self.text.tokenizer()
        names = list(map(tokenizer.id_to_token, ids)) if tokenizer is not None and with_names else None
        most = self.state.max_seq_tokens
        return {"count": len(ids), "max_model_len": most, "tokens": list(ids), "token_strs": names}

    async def detokenize(self, value: object) -> dict[str, Any]:
        """Decodes tokens to text. Raises QuireError."""
        fields = Fields(value)
        model = await self._model(fields)
        given = fields.raw("tokens")
        if not isinstance(given, list):
            raise bad_field("tokens", "must be a list of token ids")
        fields.refuse_others()
        if len(given) > model.max_tokens:
            raise SequenceTooLong(len(given), model.max_tokens)
        ids = token_ids(given, "tokens")
        tokenizer = await self.text.tokenizer()
        if tokenizer is None:
            raise NoTokenizer
        return {"prompt": await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)}

    async def count(self, value: object) -> dict[str, Any]:
        """Counts the prompt tokens of an Anthropic request. Raises QuireError."""
        await self.state.first_worker(None)
        request = messages(value, self.models.resolve, needs_max_tokens=False)
        if not request.model.is_local:
            raise unsupported("model", "a provider does not count tokens")
        return {"input_tokens": len(await self._encoded(request))}

    async def _encoded(self, request: CompletionRequest) -> list[int]:
        chat, most = request.items[0].chat, self.state.limits.max_seq_tokens
        try:
            return list(await self.text.encode_chat(chat, max_tokens=most))
        except InvalidArgument as error:
            raise error.at(request.param_of(error.field)) from None

    async def _model(self, fields: Fields) -> ResolvedModel:
        await self.state.first_worker(None)
        model = self.models.resolve(model_name(fields))
        if not model.is_local:
            raise unsupported("model", "the tokens of a provider are not known")
        return model


@dataclass(frozen=True, eq=False)
class BodyHandler:
    """The ASGI application that answers a JSON body with a JSON value."""

    answer: Callable[[object], Awaitable[dict[str, Any]]]
    body_reader: BodyReader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises QuireError. Stops if the client disconnects, since a template may take seconds."""

        async def respond(value: object) -> None:
            with counted(current_tenant(), time.monotonic):
                response = JSONResponse(await self.answer(value))
            await response(scope, receive, send)

        async with self.body_reader.read(Request(scope, receive)) as (value, _):
            await until_disconnected(receive, respond(value))
