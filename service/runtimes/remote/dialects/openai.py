"""What OpenAI's two dialects have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.dialects.base import Delta, Fields, Said, unsupported
from service.runtimes.remote.failures import broken_off
from service.runtimes.remote.sse import ServerEvent

# More are looked for here only.
MAX_STOPS = 4
_MAX_BIAS = 100.0
_FINISHES = {
    "stop": runner_pb2.FINISH_REASON_STOP,
    "length": runner_pb2.FINISH_REASON_LENGTH,
    "content_filter": runner_pb2.FINISH_REASON_CONTENT_FILTER,
    "tool_calls": runner_pb2.FINISH_REASON_TOOL_CALLS,
    "function_call": runner_pb2.FINISH_REASON_TOOL_CALLS,
}


def headers(secret: str) -> Mapping[str, str]:
    """See `Dialect`."""
    return {"authorization": f"Bearer {secret}"} if secret else {}


def common_fields(item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig) -> dict[str, object]:
    """The fields of a request that both dialects have."""
    body: dict[str, object] = {
        "model": config.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": round(item.sampling.temperature, 6),
    }
    if samples > 1:
        body["n"] = samples
    if item.stop:
        body["stop"] = list(item.stop)[:MAX_STOPS]
    sampling = item.sampling
    for name in ("top_p", "frequency_penalty", "presence_penalty"):
        if sampling.HasField(name):
            body[name] = round(getattr(sampling, name), 6)
    if sampling.HasField("seed"):
        body["seed"] = sampling.seed
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): _bias(bias) for token, bias in sampling.logit_bias.items()}
    return body | _extensions(item, config)


def _bias(bias: float) -> float:
    if bias == -math.inf:
        return -_MAX_BIAS
    if not -_MAX_BIAS <= bias <= _MAX_BIAS:
        field = "sampling.logit_bias"
        raise InvalidArgument("BAD_SAMPLING", field, f"this runtime's provider takes up to {_MAX_BIAS:g}")
    return round(bias, 6)


def _extensions(item: runner_pb2.ExecuteItem, config: ProviderConfig) -> dict[str, object]:
    """What some providers take beyond OpenAI's own fields. What changes nothing is left out."""
    sampling = item.sampling
    wanted: dict[str, object] = {}
    if sampling.top_k:
        wanted["sampling.top_k"] = sampling.top_k
    if sampling.min_p:
        wanted["sampling.min_p"] = round(sampling.min_p, 6)
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0:
        wanted["sampling.repetition_penalty"] = round(sampling.repetition_penalty, 6)
    if item.stop_token_ids:
        wanted["stop_token_ids"] = list(item.stop_token_ids)
    if item.ignore_eos:
        wanted["ignore_eos"] = True
    if wanted and not config.extensions:
        unsupported(next(iter(wanted)))
    return {field.removeprefix("sampling."): value for field, value in wanted.items()}


class OpenAIReader:
    """Reads an answer of either; a dialect says what is in a choice."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self.is_done = False

    def read(self, event: ServerEvent) -> Sequence[Said]:
        """See `Reader`."""
        if event.data == "[DONE]":
            self.is_done = True
            return ()
        said = Fields.of_event(event)
        if said.has("error"):
            raise broken_off(self._runtime, {"error": said.value("error")})
        deltas: list[Said] = [self.delta(choice) for choice in said.objects("choices")]
        if said.has("usage"):
            deltas.append(_usage(said.fields("usage")))
        return deltas

    def delta(self, choice: Fields) -> Delta:
        """What one choice of an event says."""
        raise NotImplementedError


def finish_of(choice: Fields) -> runner_pb2.FinishReason:
    """Why a choice ended, if it has. A reason that is not known is an end like any."""
    reason = choice.text("finish_reason")
    if not reason:
        return runner_pb2.FINISH_REASON_UNSPECIFIED
    return _FINISHES.get(reason, runner_pb2.FINISH_REASON_STOP)


def _usage(said: Fields) -> runner_pb2.Usage:
    return runner_pb2.Usage(
        input_tokens=said.count("prompt_tokens"),
        output_tokens=said.count("completion_tokens"),
        reasoning_tokens=said.fields("completion_tokens_details").count("reasoning_tokens"),
        cached_tokens=said.fields("prompt_tokens_details").count("cached_tokens"),
    )
