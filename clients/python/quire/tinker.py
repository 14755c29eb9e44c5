"""Samples with the names and types of Tinker's SamplingClient, so that code written for it runs here.

    from quire import tinker

    service = tinker.ServiceClient(base_url="127.0.0.1:50051")
    sampling_client = service.create_sampling_client(model_path="my-adapter")
    params = tinker.SamplingParams(max_tokens=20, temperature=0.7)
    response = sampling_client.sample(tinker.ModelInput.from_ints(prompt), 4, params).result()

Needs no package of Tinker's; its own ModelInput and SamplingParams work as well. docs/training.md lists the
differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import uuid
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

# Code for Tinker also names the types as tinker.types.ModelInput.
from quire import _tinker_types as types
from quire._background import BackgroundClient
from quire._batches import Scored
from quire._chunks import Chunk
from quire._connection import DEFAULT_TARGET
from quire._items import item
from quire._options import output_options
from quire._tinker_types import (
    EncodedTextChunk,
    ModelInput,
    ModelInputChunk,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    StopReason,
)
from quire.errors import QuireError as TinkerError
from quire.text import ModelTokenizer
from quire.v1 import runner_pb2, types_pb2

__all__ = [
    "APIFuture",
    "EncodedTextChunk",
    "ModelInput",
    "ModelInputChunk",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TinkerError",
    "types",
]

# How long a sample goes on without a connection, until it is resumed.
_KEEP_S = 10.0
_Result = TypeVar("_Result")


class APIFuture(Generic[_Result]):
    """A result that threads and tasks can wait for. Cancelling a task that awaits it ends the work."""

    def __init__(self, future: Future[_Result]) -> None:
        """Created by the clients."""
        self._future = future

    def result(self, timeout: float | None = None) -> _Result:
        """Waits for the result. Raises TimeoutError after `timeout` seconds, and what the work raises."""
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> _Result:  # noqa: ASYNC109 - of Tinker
        """See `result`."""
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(self._future)

    async def coroutine(self) -> _Result:
        """The future as a coroutine."""
        return await self

    def future(self) -> Future[_Result]:
        """The future for threads."""
        return self._future

    def __await__(self) -> Generator[Any, None, _Result]:
        return self.result_async().__await__()


class ServiceClient:
    """A connection to a server. Thread-safe. `close` it, or use `with`."""

    def __init__(
        self,
        user_metadata: object = None,  # noqa: ARG002 - of Tinker
        project_id: object = None,  # noqa: ARG002 - of Tinker
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        **settings: Any,
    ) -> None:
        """Connects when first used. Raises ValueError for invalid settings.

        Args:
            user_metadata: Ignored, and so is project_id.
            base_url: The server's target, such as `host:port`. None: the environment variable QUIRE_TARGET,
                or this machine.
            api_key: The token that is sent with every call.
            settings: Further ones of `quire.AsyncClient`, such as tls.
        """
        target = base_url or os.environ.get("QUIRE_TARGET", DEFAULT_TARGET)
        self._connection = BackgroundClient(target, {"token": api_key or "", **settings})

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: object = None,  # noqa: ARG002 - of Tinker
    ) -> SamplingClient:
        """A client for the served model, or for an adapter of it. Sends nothing.

        Args:
            model_path: The id of a LoRA adapter, of which each call uses the current version.
            base_model: The served model's id. With another one every call raises ValueError.
            retry_config: Ignored.
        """
        return SamplingClient(self._connection, model_path or "", base_model)

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None, retry_config: object = None
    ) -> SamplingClient:
        """See `create_sampling_client`. Raises QuireError, and ValueError for another base model."""
        return await self.create_sampling_client(model_path, base_model, retry_config)

    def close(self) -> None:
        """Closes the connection, also of its sampling clients, and cancels their calls."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SamplingClient:
    """Samples from one model. Thread-safe. Results are QuireError, or ValueError for invalid arguments.

    Also a future of itself: waiting for it checks that the server has the model.
    """

    def __init__(self, connection: BackgroundClient, adapter_id: str, base_model: str | None) -> None:
        """Created by `ServiceClient`."""
        self._connection = connection
        self._adapter_id = adapter_id
        self._base_model = base_model

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """Draws samples of a prompt, with the log-probabilities of their tokens.

        With `include_prompt_logprobs` the tokens of the prompt have theirs, too, and with
        `topk_prompt_logprobs` that many of the most likely tokens at the place of each.
        """
        work = self._sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
        )
        return APIFuture(self._connection.submit(work))

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResponse:
        """See `sample`."""
        return await self.sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
        )

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The log-probability of each token under the model's own distribution; None for the first one."""
        return APIFuture(self._connection.submit(self._prompt_logprobs(prompt)))

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]:
        """See `compute_logprobs`."""
        return await self.compute_logprobs(prompt)

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer. Needs the extra `text`."""
        return self._connection.submit(self._connection.tokenizer()).result()

    def get_base_model(self) -> str:
        """The served model's id."""
        return self._connection.submit(self._model()).result().model_id

    async def get_base_model_async(self) -> str:
        """See `get_base_model`."""
        return (await APIFuture(self._connection.submit(self._model()))).model_id

    def result(self, timeout: float | None = None) -> Self:
        """Itself. Raises QuireError, ValueError if the server has another model, and TimeoutError."""
        self._connection.submit(self._model()).result(timeout)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from APIFuture(self._connection.submit(self._model())).__await__()
        return self

    # In the connection's event loop.

    async def _model(self) -> types_pb2.ModelDescription:
        model = await self._connection.model()
        if self._base_model not in (None, model.model_id):
            raise ValueError(f"the server has {model.model_id}, and not {self._base_model}")
        return model

    async def _sample(
        self, prompt: ModelInput, count: int, params: SamplingParams, with_logprobs: bool, num_top: int
    ) -> SampleResponse:
        if count < 1 or (params.max_tokens is not None and params.max_tokens < 1):
            raise ValueError("at least one sample of at least one token")
        await self._model()
        tokens = prompt.to_ints()
        # First, so that the samples find its KV.
        scored = await self._score(tokens, num_top) if with_logprobs or num_top else None
        samples = await self._generated(_item(tokens, count, params, self._adapter_id))
        return SampleResponse(
            [each.sequence() for each in samples],
            _logprobs_of(scored) if scored is not None and with_logprobs else None,
            _top_of(scored) if scored is not None and num_top else None,
            samples[0].cached_tokens if scored is None else scored.reused_tokens,
        )

    async def _generated(self, asked: runner_pb2.ExecuteItem) -> list[_Sample]:
        """The samples of an item, whose stream is resumed if it breaks."""
        samples = [_Sample() for _ in range(asked.n)]
        execution = self._connection.client.execute([asked], keep_s=_KEEP_S)
        try:
            async for chunk in execution:
                samples[chunk.sample].add(chunk)
        except BaseException:
            with contextlib.suppress(TinkerError):
                await execution.cancel()
            raise
        return samples

    async def _score(self, tokens: list[int], num_top: int) -> Scored:
        output = output_options(top_logprobs=num_top)
        return await self._connection.client.score(tokens, output=output, adapter_id=self._adapter_id)

    async def _prompt_logprobs(self, prompt: ModelInput) -> list[float | None]:
        await self._model()
        return _logprobs_of(await self._score(prompt.to_ints(), 0))


@dataclass(slots=True)
class _Sample:
    """A sample, as its chunks come."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_stopped: bool = False
    cached_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        """Adds its next chunk."""
        self.tokens += chunk.token_ids
        for each in chunk.logprobs:
            is_drawn = each.HasField("sampled_logprob")
            self.logprobs.append(each.sampled_logprob if is_drawn else each.logprob)
        if chunk.finish_reason is not None:
            self.is_stopped = chunk.finish_reason == "stop"
        if chunk.usage is not None:
            self.cached_tokens = chunk.usage.cached_tokens

    def sequence(self) -> SampledSequence:
        """It as Tinker has it. A server that was restarted has no log-probabilities of earlier tokens."""
        logprobs = self.logprobs if len(self.logprobs) == len(self.tokens) else None
        stop_reason: StopReason = "stop" if self.is_stopped else "length"
        return SampledSequence(stop_reason, uuid.uuid4().hex, self.tokens, logprobs)


def _item(tokens: list[int], count: int, params: SamplingParams, adapter_id: str) -> runner_pb2.ExecuteItem:
    """What is sent for some samples. Raises ValueError."""
    given: list[str | int] = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    texts = [each for each in given if isinstance(each, str)]
    if "" in texts:
        raise ValueError("a stop text has at least one character")
    # Log-probabilities are of what a token was drawn from, else the model's own.
    is_drawn = params.temperature > 0
    return item(
        tokens,
        n=count,
        max_tokens=params.max_tokens,
        stop=texts,
        stop_token_ids=[each for each in given if isinstance(each, int)],
        ignore_eos=params.stop is not None and not given,
        tokens_only=not texts,
        sampled_logprobs=is_drawn,
        logprobs=not is_drawn,
        adapter_id=adapter_id,
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        seed=secrets.randbits(64) if params.seed is None else params.seed,
    )


def _logprobs_of(scored: Scored) -> list[float | None]:
    return [None, *scored.token_logprobs]


def _top_of(scored: Scored) -> list[list[tuple[int, float]] | None]:
    tops = [output.top for output in scored.outputs[:-1]]
    return [None, *(list(zip(top.token_ids, top.logprobs, strict=True)) for top in tops)]
