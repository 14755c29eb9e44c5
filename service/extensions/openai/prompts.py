"""The parts of a response about its prompts: their text, tokens, log-probabilities and experts.

Prompts are tokenized here, before the execution, only if one of these is requested. Otherwise the runtime
tokenizes them.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.auth.authenticator import current_tenant
from service.caches.tenants import counted
from service.extensions.openai.errors import of_prompt
from service.extensions.openai.requests import CompletionRequest
from service.extensions.openai.token_texts import TokenTexts, finite
from service.runtimes.answer_parts import encoded_prompt, parsing_of
from service.text.output_formats import OutputFormats
from service.text.text_model import TextModel


@dataclass(slots=True)
class Prompt:
    """A prompt as tokens; with its text, and the results of a Forward of it, if they are returned.

    Attributes:
        scored_from: The token that the Forward's first output is for.
    """

    token_ids: Sequence[int]
    text: str = ""
    scored: executor_pb2.ForwardResponse | None = None
    scored_from: int = 0

    def experts(self, start: int) -> Iterator[bytes]:
        """The experts of its tokens from `start` on, without the last one."""
        outputs = () if self.scored is None else self.scored.outputs[start - self.scored_from : -1]
        return (output.experts for output in outputs)


async def prompts_of(request: CompletionRequest, text: TextModel, formats: OutputFormats) -> list[Prompt]:
    """Tokenizes the prompts for the local model, or returns none if nothing of them is requested.

    Replaces the prompts of the items by their tokens. Raises InvalidArgument, NoTokenizer or SequenceTooLong.
    """
    is_scored = request.num_scored is not None or request.experts is not None
    if not (is_scored or request.echo or request.with_token_ids or request.usage_in_all):
        return []
    with counted(current_tenant(), time.monotonic, len(request.items), give_back=True):
        found = []
        for index, item in enumerate(request.items):
            with of_prompt(index, len(request.items), request.param_of):
                found.append(await _prompt_of(item, request, text, formats))
        return found


async def _prompt_of(
    item: runner_pb2.ExecuteItem, request: CompletionRequest, text: TextModel, formats: OutputFormats
) -> Prompt:
    as_run, parsing = parsing_of(item, formats)
    tokens, _ = await encoded_prompt(as_run, parsing, text, max_tokens=request.model.max_tokens)
    # A list would take nine times as much memory.
    prompt = Prompt(array("I", tokens))
    if request.echo:
        prompt.text = item.text if item.HasField("text") else await _decoded(text, prompt.token_ids)
    if parsing is not None:
        item.answer_parts.tools_json = item.chat.tools_json
    item.tokens.token_ids[:] = prompt.token_ids
    return prompt


async def _decoded(text: TextModel, token_ids: Sequence[int]) -> str:
    tokenizer = await text.tokenizer()
    return "" if tokenizer is None else await asyncio.to_thread(tokenizer.decode, list(token_ids))


def prompt_logprobs(prompt: Prompt, token_texts: TokenTexts) -> Iterator[dict[int, dict[str, Any]] | None]:
    """For each token of a prompt: the token, then the most likely ones at its place. None for the first."""
    assert prompt.scored is not None
    yield None
    for token_id, logprob, output in zip(
        prompt.token_ids[1:], prompt.scored.token_logprobs, prompt.scored.outputs, strict=False
    ):
        yield {
            each: {"logprob": value, "rank": rank, "decoded_token": token_texts.name(each)}
            for each, value, rank in ranked(token_id, logprob, output.top)
        }


def ranked(token_id: int, logprob: float, top: types_pb2.TopLogprobs) -> list[tuple[int, float, int | None]]:
    """A token, then the most likely others: each with its log-probability, and its rank if known."""
    rank = None
    others: list[tuple[int, float, int | None]] = []
    for place, (each, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), start=1):
        if each == token_id:
            rank = place
        else:
            others.append((each, finite(value), place))
    return [(token_id, finite(logprob), rank), *others]
