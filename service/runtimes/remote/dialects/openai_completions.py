"""POST /completions: a text is continued as it is."""

from __future__ import annotations

from collections.abc import Mapping

from quire.v1 import runner_pb2

from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.dialects import openai
from service.runtimes.remote.dialects.base import Delta, Fields, logprob, unsupported


class OpenAICompletions:
    """See `Dialect`."""

    kind = runner_pb2.RUNTIME_KIND_OPENAI_COMPLETIONS
    path = "/completions"
    takes_n = True

    def headers(self, secret: str) -> Mapping[str, str]:
        """See `Dialect`."""
        return openai.headers(secret)

    def body(
        self, item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig
    ) -> Mapping[str, object]:
        """See `Dialect`."""
        if item.HasField("chat"):
            unsupported("chat")
        if item.constraint.HasField("json_schema"):
            unsupported("constraint.json_schema")
        body = openai.common_fields(item, samples, config)
        body["prompt"] = list(item.tokens.token_ids) if item.HasField("tokens") else item.text
        body["max_tokens"] = item.max_tokens or config.max_output_tokens
        if item.logprobs:
            # Of the chosen tokens, and of no others.
            body["logprobs"] = 0
        return body

    def reader(self, runtime: str) -> openai.OpenAIReader:
        """See `Dialect`."""
        return _Reader(runtime)


class _Reader(openai.OpenAIReader):
    def delta(self, choice: Fields) -> Delta:
        """See `OpenAIReader`."""
        return Delta(
            sample=choice.count("index"),
            text=choice.text("text"),
            logprobs=[logprob(value) for value in choice.fields("logprobs").items("token_logprobs")],
            finish=openai.finish_of(choice),
        )
