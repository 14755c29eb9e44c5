"""What a response says of its prompts, and what reading its answers needs of them.

Prompts become tokens here, before the execution, only if something of this is wanted. Otherwise the runtime
does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.extensions.openai.requests import CompletionRequest
from service.extensions.openai.token_texts import TokenTexts, finite
from service.extensions.openai.tools import Reading
from service.text.text_model import TextModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# At the end of a prompt, where it may begin thoughts.
_LAST_TOKENS = 32


@dataclass(slots=True)
class Prompt:
    """A prompt as tokens; its text, and what a Forward says of its tokens, if it is returned.

    Attributes:
        scored_from: The token after which the Forward's first output is.
    """

    token_ids: Sequence[int]
    text: str = ""
    scored: executor_pb2.ForwardResponse | None = None
    scored_from: int = 0

    def experts(self, start: int) -> Iterator[bytes]:
        """Those of its tokens from `start` on, without the last one."""
        outputs = () if self.scored is None else self.scored.outputs[start - self.scored_from : -1]
        return (output.experts for output in outputs)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Those of a request; none if nothing of them is wanted.

    Attributes:
        is_thinking: Whether they end within thoughts.
        dropped: Texts of special tokens, which are no part of answers.
        model: Whose experts are returned. None: none are.
    """

    each: Sequence[Prompt] = ()
    is_thinking: bool = False
    dropped: frozenset[str] = frozenset()
    model: types_pb2.ModelDescription | None = None


async def prompts_of(request: CompletionRequest, text: TextModel) -> Prompts:
    """What is wanted of the prompts of this server's own model. The items get them as tokens.

    Raises InvalidArgument, NoTokenizer or SequenceTooLong.
    """
    reading = request.reading
    # Only prompts of chats begin thoughts, or have to end them.
    has_thoughts = reading is not None and reading.thoughts is not None
    dropped = frozenset[str]()
    if reading is not None:
        dropped = await _keep_markers(request.items[0], reading, text)
    is_scored = request.num_scored is not None
    is_wanted = is_scored or request.echo or request.with_token_ids or request.experts is not None
    if not (is_wanted or has_thoughts or request.usage_in_all):
        return Prompts(dropped=dropped)
    each = [Prompt(await _tokens(item, request, text)) for item in request.items]
    is_thinking = False
    tokenizer = await text.tokenizer()
    if has_thoughts and reading is not None and tokenizer is not None:
        is_thinking = await _begin_answer(each[0], reading, tokenizer, text)
    for item, prompt in zip(request.items, each, strict=True):
        if request.echo:
            prompt.text = item.text if item.HasField("text") else _decoded(tokenizer, prompt.token_ids)
        item.tokens.token_ids[:] = prompt.token_ids
    return Prompts(each, is_thinking, dropped)


async def _keep_markers(item: runner_pb2.ExecuteItem, reading: Reading, text: TextModel) -> frozenset[str]:
    """Makes special tokens a part of the text if some are markers. Returns those that are none."""
    special = (await text.special_ids()).keys()
    markers = reading.formats.markers
    if item.special_tokens_in_text or not markers & special:
        return frozenset()
    item.special_tokens_in_text = True
    return frozenset(special - markers)


async def _tokens(item: runner_pb2.ExecuteItem, request: CompletionRequest, text: TextModel) -> Sequence[int]:
    kind, most = item.WhichOneof("prompt"), request.model.max_tokens
    if kind == "tokens":
        return list(item.tokens.token_ids)
    if kind == "text":
        return await text.encode(item.text, max_tokens=most)
    return await text.encode_chat(item.chat, max_tokens=most)


async def _begin_answer(prompt: Prompt, reading: Reading, tokenizer: Tokenizer, text: TextModel) -> bool:
    """Whether the prompt ends within thoughts, which are ended if the answer must have none."""
    form = reading.thoughts
    assert form is not None
    last = _decoded(tokenizer, prompt.token_ids[-_LAST_TOKENS:], skip_special_tokens=False)
    is_thinking = bool(form.begin) and last.rstrip().endswith(form.begin)
    if not reading.is_direct:
        return is_thinking
    added = form.end + form.after if is_thinking else form.answer
    if added:
        more = await text.encode(added, max_tokens=len(added), add_special_tokens=False)
        prompt.token_ids = [*prompt.token_ids, *more]
    return False


def _decoded(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    if tokenizer is None:
        return ""
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def prompt_logprobs(prompt: Prompt, token_texts: TokenTexts) -> Iterator[dict[int, dict[str, Any]] | None]:
    """For each token of a prompt: it, then the most likely ones at its place. The first has none."""
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
    """A token, then the most likely others: each with its log-probability and its rank, if that is known."""
    rank = None
    others: list[tuple[int, float, int | None]] = []
    for place, (each, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), start=1):
        if each == token_id:
            rank = place
        else:
            others.append((each, finite(value), place))
    return [(token_id, finite(logprob), rank), *others]
