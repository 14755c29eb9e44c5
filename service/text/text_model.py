"""The served model's tokenizer, chat template and constraints. Workers send the tokenizer and the template.

The tokenizer is loaded at its first use, which takes a second for a large vocabulary. Texts are encoded in
processes; only tokens are decoded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.v1 import runner_pb2

from service.errors import InvalidArgument, NoTokenizer, QuireError, SequenceTooLong, Unsupported
from service.logging import get_logger
from service.text import tasks
from service.text.bounded_json import check_chat
from service.text.chat_template import ChatTemplates, TemplateError
from service.text.chats import prompt_of
from service.text.constraints import Constraints, Matcher
from service.text.task_pool import TaskPool
from service.text.task_process import TaskFailed, TaskProcess
from service.text.token_bytes import token_bytes
from service.text.tokenizer import decodes_in_bounds, encode_task, encoded, load_tokenizer
from workers.common import worker_pb2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = get_logger(__name__)
# No text has more characters per token on average. Encoding takes some 170 bytes for each character.
_MAX_CHARACTERS_PER_TOKEN = 32


@dataclass(eq=False, slots=True)
class _Loaded:
    """A tokenizer, and what depends on it."""

    ready: worker_pb2.WorkerReady
    tokenizer: Tokenizer | None = None
    encoder: TaskPool | None = None
    # The special tokens by their texts.
    special_ids: Mapping[str, int] = field(default_factory=dict)
    # Made at the first use; or why they are not supported.
    constraints: Constraints | Unsupported | None = None


class TextModel:
    """Owns the served model's tokenizer, and the processes for templates and constraints."""

    def __init__(self, ready: Callable[[], worker_pb2.WorkerReady], tenant: Callable[[], str]) -> None:
        """`ready`: a worker's description of the model; raises NoWorker until there is one.

        `tenant`: the tenant of the current call.
        """
        self._ready = ready
        self._tenant = tenant
        self._loaded: _Loaded | None = None
        self._load_lock = asyncio.Lock()
        self._templates = ChatTemplates()

    async def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None: it has none, or one that cannot be used."""
        return (await self._load()).tokenizer

    async def special_ids(self) -> Mapping[str, int]:
        """The special tokens by their texts, which are not part of a sample's text; empty: no tokenizer."""
        return (await self._load()).special_ids

    async def encode(
        self, text: str, *, max_tokens: int, add_special_tokens: bool = True, field: str = "text"
    ) -> Sequence[int]:
        """A text's tokens. `field`: the field of the request that has the text.

        Raises InvalidArgument if the tokenizer fails on it, NoTokenizer, or SequenceTooLong.
        """
        loaded = await self._load()
        if loaded.encoder is None:
            raise NoTokenizer
        if len(text) > max_tokens * _MAX_CHARACTERS_PER_TOKEN:
            raise SequenceTooLong(-(-len(text) // _MAX_CHARACTERS_PER_TOKEN), max_tokens)
        task = encode_task(text, add_special_tokens=add_special_tokens)
        try:
            return encoded(await loaded.encoder.run(lambda process: process.run(task), self._tenant()))
        except TaskFailed as error:
            message = f"the model's tokenizer cannot encode it: it {error}"
            raise InvalidArgument("BAD_TEXT", field, message) from None

    async def encode_chat(self, chat: runner_pb2.Chat, *, max_tokens: int) -> Sequence[int]:
        """The tokens of messages, formatted by the model's template. Raises as `encode`."""
        template = self._ready().chat_template
        if not template.sources:
            text = "the model has no chat template: send text or tokens"
            raise InvalidArgument("NO_CHAT_TEMPLATE", "chat", text)
        await check_chat(chat)
        if not chat.messages:
            raise InvalidArgument("EMPTY_PROMPT", "chat.messages", "at least one message is needed")
        text = await prompt_of(self._templates, template, chat, self._tenant())
        # The template has written the special tokens.
        return await self.encode(text, max_tokens=max_tokens, add_special_tokens=False, field="chat")

    async def encode_pair(self, query: str, document: str, *, max_tokens: int) -> Sequence[int]:
        """The tokens of a query and a document, as the template of a cross-encoder has them. As `encode`."""
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        try:
            text = await self._templates.render(self._ready().chat_template, messages, tenant=self._tenant())
        except TemplateError as error:
            raise InvalidArgument("BAD_CHAT", "text", str(error)) from None
        return await self.encode(text, max_tokens=max_tokens, add_special_tokens=False)

    async def constraint(
        self, kind: str, grammar: str, end_ids: frozenset[int], vocab_size: int
    ) -> Callable[[], Matcher]:
        """A function that makes a matcher for each sample. `kind` is a field of Constraint, except mask.

        `end_ids`: allowed where the constraint may end. Raises InvalidArgument, NoTokenizer, or Unsupported
        if the text of tokens differs from place to place.
        """
        loaded = await self._load()
        if loaded.tokenizer is None:
            raise NoTokenizer
        async with self._load_lock:
            if loaded.constraints is None:
                loaded.constraints = await asyncio.to_thread(_constraints, loaded.tokenizer, vocab_size)
        if isinstance(loaded.constraints, Unsupported):
            raise loaded.constraints.without_traceback()
        constraints, tenant = loaded.constraints, self._tenant()
        return await constraints.matcher_factory(kind, grammar, end_ids, vocab_size, tenant)

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        self._templates.close()
        if self._loaded is not None:
            if self._loaded.encoder is not None:
                self._loaded.encoder.close()
            if isinstance(self._loaded.constraints, Constraints):
                self._loaded.constraints.close()

    async def _load(self) -> _Loaded:
        ready = self._ready()
        if self._loaded is not None and self._loaded.ready is ready:
            return self._loaded
        async with self._load_lock:
            if self._loaded is not None and _is_same(self._loaded.ready, ready):
                # A new worker of the same model, or another model with the same tokenizer.
                self._loaded.ready = ready
            else:
                # Running samples keep the previous tokenizer and its processes.
                self._loaded = await _load(ready)
        return self._loaded


def _constraints(tokenizer: Tokenizer, vocab_size: int) -> Constraints | Unsupported:
    """Takes a second for a large vocabulary."""
    try:
        return Constraints(*token_bytes(tokenizer, vocab_size))
    except Unsupported as error:
        return error


def _is_same(loaded: worker_pb2.WorkerReady, ready: worker_pb2.WorkerReady) -> bool:
    """Whether both have the same tokenizer, for as many tokens."""
    is_same_size = loaded.model.vocab_size == ready.model.vocab_size
    return is_same_size and loaded.tokenizer_json == ready.tokenizer_json


async def _load(ready: worker_pb2.WorkerReady) -> _Loaded:
    if not ready.tokenizer_json:
        return _Loaded(ready)
    # Loading normalizes added tokens: it is tried in the process first.
    process = TaskProcess(tasks.ENCODE)
    try:
        await process.run(ready.tokenizer_json)
        loaded = await asyncio.to_thread(_load_here, ready)
    except (OSError, QuireError, asyncio.CancelledError):
        # The system has no process or descriptor left. Not stored: the next call tries again.
        await process.end()
        raise
    except BaseException as error:  # the library has no type for its errors, and panics are no Exceptions
        await process.end()
        _log.error("the model's tokenizer.json cannot be used: texts are refused", error=str(error)[:300])
        return _Loaded(ready)
    loaded.encoder = TaskPool(tasks.ENCODE, ready.tokenizer_json, process)
    return loaded


def _load_here(ready: worker_pb2.WorkerReady) -> _Loaded:
    """What decodes tokens in this process. Raises ValueError, and what the library raises."""
    tokenizer = load_tokenizer(ready.tokenizer_json)
    if not decodes_in_bounds(tokenizer):
        raise ValueError("its decoder may produce long texts from few tokens")
    added = tokenizer.get_added_tokens_decoder()
    special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
    return _Loaded(ready, tokenizer, special_ids=special_ids)
