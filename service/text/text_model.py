"""Text as the model's tokens, and back: its tokenizer and chat template, as the workers hand them out.

The tokenizer is built when it is first needed, which for a large vocabulary takes a second. What may take
long runs in threads or processes, so many at a time: the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.v1 import runner_pb2, worker_pb2

from service.errors import (
    NOT_FAILURES,
    InvalidArgument,
    NoTokenizer,
    QuireError,
    SequenceTooLong,
    Unsupported,
)
from service.logging import get_logger
from service.text.bounded_encoder import BoundedEncoder, check_loading
from service.text.bounded_json import arguments_field, check_chat, parsed
from service.text.chat_template import DEFAULT, TemplateError, make_task
from service.text.constraints import Constraints
from service.text.detokenizer import Decodes
from service.text.grammar_engine import Vocabulary
from service.text.matcher import Matcher
from service.text.task_process import TaskFailed
from service.text.template_pool import TemplatePool
from service.text.token_bytes import constrained_tokens
from service.text.tokenizer_bounds import decodes_in_bounds, encodes_in_bounds

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = get_logger(__name__)
# Threads that encode texts.
_AT_ONCE = 2
# A text so short is encoded at once: some tens of microseconds.
_SHORT_CHARACTERS = 512
_ROLES = {
    runner_pb2.CHAT_ROLE_SYSTEM: "system",
    runner_pb2.CHAT_ROLE_USER: "user",
    runner_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    runner_pb2.CHAT_ROLE_TOOL: "tool",
}


@dataclass(eq=False, slots=True)
class _Built:
    """What was made of a worker's answer."""

    ready: worker_pb2.WorkerReady
    tokenizer: Tokenizer | None = None
    # Encodes in place of the tokenizer, if that may take long or much memory.
    encoder: BoundedEncoder | None = None
    # By the size of the model's vocabulary; made when they are first needed. Or why they cannot be.
    constraints: dict[int, Constraints | Unsupported] = field(default_factory=dict)


# No text has tokens of so many characters on average. Encoding takes some 170 bytes for each.
_MOST_CHARACTERS = 32
_MANY_TOKENS = 1 << 20


class TextModel:
    """Owner of the tokenizer of the model that is served, and of processes for templates and constraints."""

    def __init__(
        self, ready: Callable[[], worker_pb2.WorkerReady], tenant: Callable[[], str] = lambda: ""
    ) -> None:
        """`ready`: what a worker said of its model; raises NoWorker until there is one.

        `tenant`: whose the call is that is being handled.
        """
        self._ready = ready
        self._tenant = tenant
        self._built: _Built | None = None
        self._building = asyncio.Lock()
        self._threads = asyncio.Semaphore(_AT_ONCE)
        self._templates = TemplatePool()

    async def tokenizer(self) -> Decodes | None:
        """The model's tokenizer; None: it has none, or none that can be used."""
        return (await self._own()).tokenizer

    async def encode(
        self,
        text: str,
        *,
        max_tokens: int = _MANY_TOKENS,
        add_special_tokens: bool = True,
        field: str = "text",
    ) -> Sequence[int]:
        """A text's tokens. `field`: where the caller has sent it.

        Raises:
            InvalidArgument: The tokenizer fails at it.
            NoTokenizer: The model has none.
            SequenceTooLong: It must have more than `max_tokens`.
        """
        built = await self._own()
        tokenizer = built.tokenizer
        if tokenizer is None:
            raise NoTokenizer
        if len(text) > max_tokens * _MOST_CHARACTERS:
            raise SequenceTooLong(-(-len(text) // _MOST_CHARACTERS), max_tokens)
        with _refusing(field):
            if built.encoder is not None:
                tenant = self._tenant()
                return await built.encoder.encode(text, add_special_tokens=add_special_tokens, tenant=tenant)
            if len(text) <= _SHORT_CHARACTERS:
                return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            async with self._threads:
                # One text, by the call that lets other threads run meanwhile.
                (encoded,) = await asyncio.to_thread(
                    tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens
                )
            return encoded.ids

    async def encode_chat(self, chat: runner_pb2.Chat, *, max_tokens: int = _MANY_TOKENS) -> Sequence[int]:
        """Messages as the model's template writes them. Raises InvalidArgument, and as `encode`."""
        template = self._ready().chat_template
        if not template.sources:
            text = "the model has no chat template: send text or tokens"
            raise InvalidArgument("NO_CHAT_TEMPLATE", "chat", text)
        await check_chat(chat)
        messages, tools = _messages(chat), _tools(chat)
        name = chat.template or DEFAULT
        try:
            task = make_task(template, messages, name=name, tools=tools)
            text = await self._templates.write(template.sources[name], task)
        except TemplateError as error:
            raise InvalidArgument("BAD_CHAT", "chat", str(error)) from None
        if tools:
            plain = make_task(template, messages, name=name)
            await self._check_tools(template.sources[name], plain, text)
        # A template writes special tokens itself.
        return await self.encode(text, max_tokens=max_tokens, add_special_tokens=False, field="chat")

    async def _check_tools(self, source: str, plain: bytes, text: str) -> None:
        """Raises InvalidArgument if `plain`, the task without tools, gives the same text."""
        # A template that fails without tools reads them.
        with contextlib.suppress(TemplateError):
            if await self._templates.write(source, plain) == text:
                message = "the model's chat template does not write tools"
                raise InvalidArgument("BAD_CHAT", "chat.tools_json", message)

    async def constraint(
        self, constraint: runner_pb2.Constraint, end_ids: frozenset[int], vocab_size: int
    ) -> Callable[[], Matcher]:
        """What makes a matcher for each sample of a constraint that is no mask.

        Args:
            constraint: As a caller has sent it.
            end_ids: Tokens that end a sample: allowed where the constraint may end, and nowhere else.
            vocab_size: Of the model's logits, which may be more than the tokenizer's tokens.

        Raises:
            InvalidArgument: The constraint cannot be used.
            NoTokenizer: Texts mean nothing to the model.
            Unsupported: Its tokens have no texts of their own.
        """
        built = await self._own()
        if built.tokenizer is None:
            raise NoTokenizer
        kind = constraint.WhichOneof("kind")
        if kind is None or kind == "mask":
            raise InvalidArgument(
                "BAD_CONSTRAINT", "constraint", "a schema, an expression or a grammar is needed"
            )
        async with self._building:
            if vocab_size not in built.constraints:
                made = await asyncio.to_thread(_constraints, built.tokenizer, vocab_size)
                built.constraints[vocab_size] = made
        constraints = built.constraints[vocab_size]
        if isinstance(constraints, Unsupported):
            raise constraints.untraced()
        return await constraints.factory(kind, getattr(constraint, kind), end_ids)

    def close(self) -> None:
        """Ends all processes. May be called again."""
        self._templates.close()
        if self._built is not None:
            if self._built.encoder is not None:
                self._built.encoder.close()
            for constraints in self._built.constraints.values():
                if isinstance(constraints, Constraints):
                    constraints.close()

    async def _own(self) -> _Built:
        ready = self._ready()
        if self._built is not None and self._built.ready is ready:
            return self._built
        async with self._building:
            if self._built is not None and self._built.ready.tokenizer_json == ready.tokenizer_json:
                # A new worker of the same model, or another model with its tokens.
                self._built.ready = ready
            else:
                # Samples that are under way keep what they have of the one before, and its processes.
                self._built = await asyncio.to_thread(_build, ready)
        return self._built


def _constraints(tokenizer: Tokenizer, vocab_size: int) -> Constraints | Unsupported:
    """Takes a second for a large vocabulary."""
    try:
        vocabulary = Vocabulary(*constrained_tokens(tokenizer))
    except Unsupported as error:
        return error
    return Constraints(vocabulary, vocab_size)


def _build(ready: worker_pb2.WorkerReady) -> _Built:
    # Who sends tokens has no use for it.
    from tokenizers import Tokenizer  # noqa: PLC0415

    if not ready.tokenizer_json:
        return _Built(ready)
    try:
        check_loading(ready.tokenizer_json)
        tokenizer = Tokenizer.from_buffer(ready.tokenizer_json)
        if not decodes_in_bounds(tokenizer):
            raise ValueError("its decoder may make long texts of few tokens")
        encoder = None if encodes_in_bounds(tokenizer) else BoundedEncoder(ready.tokenizer_json)
    except OSError:
        # The system has no process or descriptor left: it may the next time.
        raise
    except BaseException as error:  # the library has no kind of its own, and some are panics
        _log.error("the model's tokenizer.json cannot be used: texts are refused", error=str(error)[:300])
        return _Built(ready)
    return _Built(ready, tokenizer, encoder)


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    """What a tokenizer raises, panics included, is due to the text in `field`: raises InvalidArgument."""
    try:
        yield
    except (QuireError, *NOT_FAILURES):
        raise
    except TaskFailed as error:
        text = f"the model's tokenizer cannot encode it: it {error}"
        raise InvalidArgument("BAD_TEXT", field, text) from None
    except BaseException:
        _log.exception("a text could not be encoded")
        raise InvalidArgument("BAD_TEXT", field, "the model's tokenizer cannot encode it") from None


def _messages(chat: runner_pb2.Chat) -> Sequence[Mapping[str, Any]]:
    """Messages as templates know them. Raises InvalidArgument."""
    if not chat.messages:
        raise InvalidArgument("EMPTY_PROMPT", "chat.messages", "at least one message is needed")
    messages = []
    for index, message in enumerate(chat.messages):
        role = _ROLES.get(message.role)
        if role is None:
            raise InvalidArgument("BAD_CHAT", f"chat.messages[{index}].role", "a role is needed")
        written: dict[str, Any] = {"role": role, "content": message.content}
        if message.tool_calls:
            written["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    # As templates take them: a value, not its text.
                    "function": {"name": call.name, "arguments": _arguments(call, index, number)},
                }
                for number, call in enumerate(message.tool_calls)
            ]
        if message.tool_call_id:
            written["tool_call_id"] = message.tool_call_id
        messages.append(written)
    return messages


def _arguments(call: runner_pb2.ToolCall, message: int, number: int) -> object:
    return parsed(call.arguments_json or "{}", "BAD_CHAT", arguments_field(message, number))


def _tools(chat: runner_pb2.Chat) -> list[Any] | None:
    if not chat.tools_json:
        return None
    tools = parsed(chat.tools_json, "BAD_CHAT", "chat.tools_json")
    if not isinstance(tools, list):
        raise InvalidArgument("BAD_CHAT", "chat.tools_json", "tools_json is not a list in JSON")
    return tools
