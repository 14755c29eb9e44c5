"""vLLM's /inference/v1/generate: token ids in, token ids out, for code that renders prompts itself.

The fields are those of vLLM's `GenerateRequest`, `SamplingParams` and `GenerateResponse`. Log-probabilities
name a token in both of vLLM's forms: `token_id`, and `token` as "token_id:N".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from quire.v1 import runner_pb2, types_pb2

from service.api.validation import MAX_REQUEST_ID_CHARS
from service.extensions.openai.fields import Fields, array, bad_field, boolean, integer, string, unsupported
from service.extensions.openai.item_fields import (
    GENERATE,
    GENERATE_PARAMS,
    GENERATE_REQUEST,
    MAX_TOP_LOGPROBS,
    given,
    set_fields,
)
from service.extensions.openai.prompts import ranked
from service.extensions.openai.requests import (
    NEUTRAL,
    CompletionRequest,
    ResolveModel,
    model_name,
    new_item,
    priority_of,
    prompt_tokens,
    stream_options,
)
from service.extensions.openai.responses import CompletionResponse
from service.extensions.openai.routed_experts import NONE, routed_experts

_MAX_IDS = 1 << 20
_IGNORED = frozenset({"token_offsets", "reasoning_ended", "reasoning_parser_kwargs"})
# Fields for detokenization, and fields that only vLLM's own code sets.
_IGNORED_SETTINGS = frozenset(
    {
        "detokenize", "flat_logprobs", "include_stop_str_in_output", "output_kind",
        "output_text_buffer_length", "return_token_ids", "skip_clone",
        "skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens",
        "stream_interval",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(CompletionRequest):
    """A valid request with one item, not yet checked against the model."""

    request_id: str
    # The number of alternatives to each output token. None: no log-probabilities.
    num_top: int | None


def generate(
    value: object, resolve: ResolveModel, *, is_processed: bool = False, experts_form: str = NONE
) -> GenerateRequest:
    """Parses a request to /inference/v1/generate.

    `is_processed`: log-probabilities are those of the sampling distribution. `experts_form`: the form of
    `routed_experts`. Raises InvalidArgument, and whatever `resolve` raises.
    """
    fields = Fields(value)
    model = resolve(model_name(fields))
    if not model.is_local:
        raise unsupported("model", "a provider takes and returns no token ids")
    # vLLM does not use a model's recommended settings here, so they are not used.
    item = new_item(replace(model, sampling_defaults=types_pb2.SamplingParams()))
    prompt = fields.get("token_ids", array, _MAX_IDS)
    if not prompt:
        raise bad_field("token_ids", "must be a list of at least one token id")
    item.tokens.token_ids.extend(prompt_tokens(prompt, "token_ids", model.max_tokens))
    params = _settings(fields.raw("sampling_params"))
    set_fields(item, params, GENERATE_PARAMS)
    item.tokens_only = not item.stop
    num_top = params.get("logprobs", integer, 0, MAX_TOP_LOGPROBS)
    _set_logprobs(item, num_top, is_processed=is_processed)
    experts = routed_experts(params, experts_form, model, is_stream=False)
    item.experts = experts is not None
    options = stream_options(fields)
    num_prompt_top = params.get("prompt_logprobs", integer, 0, MAX_TOP_LOGPROBS)
    if options["is_stream"] and num_prompt_top is not None:
        raise unsupported("sampling_params.prompt_logprobs", "a stream has none")
    set_fields(item, fields, GENERATE_REQUEST)
    params.refuse_others(_IGNORED_SETTINGS, NEUTRAL)
    request_id = fields.get("request_id", string) or ""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise bad_field("request_id", f"has more than {MAX_REQUEST_ID_CHARS} characters")
    if fields.raw("output_mode") not in (None, "tokens"):
        raise unsupported("output_mode", "must be tokens")
    if fields.get("return_token_ids", boolean):
        raise unsupported("return_token_ids", "the prompt is used as it is sent")
    priority = priority_of(fields)
    fields.refuse_others(_IGNORED, {"content_parts": []})
    return GenerateRequest(
        items=[item],
        model=model,
        tables=(given(params, GENERATE_PARAMS), given(fields, GENERATE_REQUEST), GENERATE),
        is_chat=False,
        has_logprobs=num_top is not None,
        **options,
        priority=priority,
        request_id=request_id,
        num_top=num_top,
        num_prompt_top=num_prompt_top,
        experts=experts,
    )


def _settings(given: object) -> Fields:
    if isinstance(given, dict) and given.get("seed") == -1:
        # In vLLM this value means no seed.
        given = {**given, "seed": None}
    return Fields(given, "sampling_params")


def _set_logprobs(item: runner_pb2.ExecuteItem, num_top: int | None, *, is_processed: bool) -> None:
    """`num_top`: the number of alternatives, including the token itself. None: no log-probabilities."""
    if num_top is None:
        return
    if not (is_processed and item.sampling.temperature > 0):
        # With one alternative vLLM returns only the token itself.
        item.logprobs, item.top_logprobs = True, num_top if num_top > 1 else 0
    elif num_top > 1:
        text = "at most 1 with --openai-logprobs-mode processed_logprobs"
        raise unsupported("sampling_params.logprobs", text)
    else:
        item.sampled_logprobs = True


class GenerateResponse(CompletionResponse):
    """The response: all choices, as token ids."""

    _request: GenerateRequest

    def begin(self, started: runner_pb2.ExecutionStarted) -> None:
        request = self._request
        self._head = {
            "request_id": request.request_id or started.request_id,
            "created": self._created,
            "model": request.model.adapter_id or started.model_id,
            "output_mode": "tokens",
        }

    def events(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        choice, _ = self._update_choice(chunk)
        # All experts are sent at the end, as in vLLM.
        choice.experts.extend(chunk.experts)
        if chunk.token_ids or choice.finish:
            fields = self._fields(choice.index, choice.finish, lambda: iter((chunk,)))
            if choice.finish:
                fields |= self._routed_experts(choice, choice.experts)
            yield self._event(fields)

    def _body(self) -> dict[str, Any]:
        choice = next(iter(self._choices.values()))
        return {"prompt_logprobs": None, **self._prompt_fields(choice), **super()._body()}

    def _whole(self, choice: Any) -> dict[str, Any]:
        fields = self._fields(choice.index, choice.finish, choice.chunks)
        return {**fields, **self._routed_experts(choice)}

    def _fields(
        self, index: int, finish: str | None, chunks: Callable[[], Iterator[runner_pb2.SampleChunk]]
    ) -> dict[str, Any]:
        token_ids = (token_id for chunk in chunks() for token_id in chunk.token_ids)
        logprobs = None
        if self._request.has_logprobs:
            entries = (entry for chunk in chunks() for entry in self._token_entries(chunk))
            logprobs = {"content": entries}
        return {"index": index, "token_ids": token_ids, "logprobs": logprobs, "finish_reason": finish}

    def _token_entries(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        """Each token with the most likely others: together as many as requested."""
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=False):
            entries = [
                {"token": f"token_id:{each}", "token_id": each, "logprob": value, "rank": rank}
                for each, value, rank in ranked(token_id, _value(logprob), logprob.top)
            ]
            top = entries[: max(1, self._request.num_top or 0)]
            yield {**entries[0], "top_logprobs": top}


def _value(logprob: runner_pb2.TokenLogprob) -> float:
    is_processed = logprob.HasField("sampled_logprob")
    return logprob.sampled_logprob if is_processed else logprob.logprob
