"""The HTTP server for OpenAI's API, in the gateway's event loop.

A request becomes an execution of ModelRunnerService, with the same authentication, limits and runtimes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.auth.connections import handshake_limits
from service.auth.tls import http_context
from service.completion import wait_until
from service.config import Config
from service.errors import Unsupported
from service.extension import Extension, GatewayParts
from service.extensions.http.connection import HttpLimits
from service.extensions.http.server import HttpServer
from service.extensions.openai import page, requests, routed_experts
from service.extensions.openai.adapter_calls import AdapterCalls
from service.extensions.openai.anthropic_messages import MessageResponse, messages
from service.extensions.openai.bodies import BodyReader
from service.extensions.openai.cross_encoder import CrossEncoder
from service.extensions.openai.embeddings import EmbeddingHandler, embeddings, rerank, score
from service.extensions.openai.generate import GenerateResponse, generate
from service.extensions.openai.generation import CompletionHandler
from service.extensions.openai.middleware import MESSAGES, Access, GuardedRoute, Middleware
from service.extensions.openai.models import Models
from service.extensions.openai.responses_api import ResponsesResponse, earlier_messages, responses
from service.extensions.openai.stored_responses import StoredResponseHandler, StoredResponses
from service.extensions.openai.tokenize import BodyHandler, Tokens
from service.extensions.openai.weight_transfer import NONE, WeightTransfer
from service.pool.launcher import PoolFailed
from service.runtimes.embedding import Embedder
from service.setting_rules import is_private
from workers.common.protocol import EXIT_CONFIG

RESPONSES = "/v1/responses"
_MAX_HEAD_BYTES = 1 << 16


def _limits(config: Config) -> HttpLimits:
    return HttpLimits(
        max_connections=config.max_connections,
        max_head_bytes=_MAX_HEAD_BYTES,
        idle_s=config.message_timeout_s,
        unread_s=config.message_timeout_s,
    )


class OpenAiFront(Extension):
    """The extension. Owner of the HTTP server."""

    port_for = "HTTP"

    def __init__(self, listen: str, logprobs_mode: str, experts_form: str, backend: str) -> None:
        """`backend`: the library by which trainers broadcast weights."""
        self.listen, self._logprobs_mode = listen, logprobs_mode
        self._experts_form, self._backend = experts_form, backend
        self._transfer: WeightTransfer | None = None

    def attach(self, parts: GatewayParts) -> None:
        """Creates the server. Raises ConfigError for unusable certificates."""
        self._state = parts.state
        config = parts.state.config
        self._models = Models(parts.runner.router, parts.state)
        self.bodies = BodyReader(parts.state.receiver, config.max_request_bytes, parts.state.budgets)
        routes = [*self._routes(parts), *self._operators_routes(parts)]
        self._middleware = self.app = Middleware(routes, parts.authenticator, parts.state, self.listen)
        for wrap in reversed(parts.http):
            self.app = wrap(self.app)
        context, limits = http_context(config), _limits(config)
        tls = None if context is None else (context, handshake_limits(config))
        self.server = HttpServer(self.app, self.listen, limits, tls=tls, is_shared=config.gateways > 1)

    def _routes(self, parts: GatewayParts) -> list[GuardedRoute]:
        form = self._experts_form
        max_bytes = self._state.config.max_request_bytes
        completion = functools.partial(requests.completion, experts_form=form, max_bytes=max_bytes)
        chat = functools.partial(requests.chat, experts_form=form)
        is_processed = self._logprobs_mode == "processed_logprobs"
        of_tokens = functools.partial(generate, is_processed=is_processed, experts_form=form)
        stored = StoredResponses()
        completing = functools.partial(
            CompletionHandler,
            executions=parts.runner.executions,
            models=self._models,
            state=self._state,
            text=parts.text,
            body_reader=self.bodies,
            forward=parts.api.Forward,
        )
        of_texts = self._state, parts.text, parts.api.BatchForward
        comparing = functools.partial(
            EmbeddingHandler,
            models=self._models,
            state=self._state,
            embedder=Embedder(*of_texts),
            cross_encoder=CrossEncoder(*of_texts),
            body_reader=self.bodies,
        )
        tokens = Tokens(self._models, self._state, parts.text)
        posted: dict[str, Callable[..., Any]] = {
            "/v1/completions": completing(completion),
            "/v1/chat/completions": completing(chat),
            "/inference/v1/generate": completing(of_tokens, response=GenerateResponse, needs_text=False),
            MESSAGES: completing(messages, response=MessageResponse),
            RESPONSES: completing(
                functools.partial(responses, stored=stored),
                response=ResponsesResponse,
                earlier=functools.partial(earlier_messages, stored=stored),
            ),
            "/v1/embeddings": comparing(embeddings),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), comparing(rerank)),
            **dict.fromkeys(("/score", "/v1/score"), comparing(score)),
            "/tokenize": BodyHandler(tokens.tokenize, self.bodies),
            "/detokenize": BodyHandler(tokens.detokenize, self.bodies),
            f"{MESSAGES}/count_tokens": BodyHandler(tokens.count, self.bodies),
        }
        of_response = StoredResponseHandler(stored, self._state.budgets), Access.EXECUTE, ["GET", "DELETE"]
        return [
            *page.routes(),
            GuardedRoute("/health", self._health, Access.PROBE),
            GuardedRoute("/v1/models", self._list_models, Access.LIST),
            GuardedRoute("/v1/models/{model:path}", self._get_model, Access.LIST),
            *(GuardedRoute(path, handler, Access.EXECUTE, ["POST"]) for path, handler in posted.items()),
            GuardedRoute(f"{RESPONSES}/{{response_id}}", *of_response),
        ]

    def _operators_routes(self, parts: GatewayParts) -> list[GuardedRoute]:
        # As for gRPC: without authentication only for callers on this machine.
        is_safe = parts.authenticator is not None or is_private(self.listen)
        if self._backend == NONE or parts.admin is None or not is_safe:
            return []
        self._transfer = WeightTransfer(parts.admin, self._backend, self._state.config.message_timeout_s)
        return [*self._transfer.routes(self.bodies), *AdapterCalls(parts.admin).routes(self.bodies)]

    def bind(self) -> int:
        """Binds the address; clients can connect from now on. Returns the port. Raises CannotListen."""
        return self.server.bind()

    async def run(self) -> None:
        """Serves until `stop`. `bind` must be called before. Raises PoolFailed: see `_require_experts`."""
        async with asyncio.TaskGroup() as tasks:
            checking = tasks.create_task(self._require_experts())
            await self.server.run()
            checking.cancel()

    async def _require_experts(self) -> None:
        """Raises PoolFailed if experts are configured but the model has none: trainers learn it early."""
        if self._experts_form == routed_experts.NONE:
            return
        await wait_until(lambda: self._state.current_limits is not None)
        try:
            self._state.limits.experts.require("")
        except Unsupported as error:
            form = f"openai_routed_experts = {self._experts_form}"
            raise PoolFailed(f"{form} needs a model with experts: {error}", EXIT_CONFIG) from None

    async def stop(self, grace_s: float) -> None:
        """Accepts no more requests, waits `grace_s` for running ones, then fails the rest with Draining."""
        await asyncio.gather(self._middleware.stop(grace_s), self.server.stop(grace_s))
        if self._transfer is not None:
            await self._transfer.close()

    @property
    def num_connections(self) -> int:
        """Connections that are not closed yet."""
        return len(self.server.connections)

    # Requests without an execution.

    async def _health(self, _request: Request) -> Response:
        state = self._state.state_name
        return JSONResponse({"status": state}, 200 if state == "serving" else 503)

    async def _list_models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models.listed()})

    async def _get_model(self, request: Request) -> Response:
        return JSONResponse(self._models.entry(request.path_params["model"]))
