"""The served model's tokenizer, templates and constraints, and errors where it has none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest
from quire.v1 import runner_pb2, types_pb2
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from service.errors import Draining, InvalidArgument, NoTokenizer, SequenceTooLong, Unsupported
from service.text import tasks
from service.text.tasks import ENCODE
from service.text.text_model import TextModel
from tests.chat_templates import QWEN
from tests.service.text.kinds import byte_level, ctc
from workers.common import worker_pb2

MANY_TOKENS = 1 << 20
REGEX = ("regex", "[0-9]+")


class ServedModel:
    """A text model, with the worker's answer that it reads; `serve` replaces the model."""

    def __init__(self) -> None:
        self.tenant = ContextVar("tenant", default="")
        self.text = TextModel(lambda: self.ready, self.tenant.get)
        self.serve(byte_level())

    def serve(self, tokenizer: Tokenizer | None, template: str = QWEN) -> None:
        self.ready = worker_pb2.WorkerReady()
        if tokenizer is not None:
            self.ready.tokenizer_json = tokenizer.to_str().encode()
        if template:
            self.ready.chat_template.CopyFrom(types_pb2.ChatTemplate(sources={"default": template, "x": "x"}))

    async def encode(self, text: str) -> Sequence[int]:
        return await self.text.encode(text, max_tokens=MANY_TOKENS)

    async def encode_chat(self, chat: runner_pb2.Chat) -> Sequence[int]:
        return await self.text.encode_chat(chat, max_tokens=MANY_TOKENS)


@pytest.fixture
async def served() -> AsyncIterator[ServedModel]:
    served = ServedModel()
    yield served
    served.text.close()


def chat(content: str, **more: Any) -> runner_pb2.Chat:
    message = runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_USER, content=content)
    return runner_pb2.Chat(messages=[message], **more)


async def test_the_template_formats_messages(served: ServedModel) -> None:
    tokenizer = byte_level()
    for content in ("hi", "\u4e16"):
        ids = await served.encode_chat(chat(content))
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(await served.encode_chat(chat("hi", template="x"))) == "x"
    tools = [{"type": "function", "function": {"name": "f"}}]
    ids = await served.encode_chat(chat("hi", tools_json=json.dumps(tools)))
    assert json.dumps(tools[0]) in tokenizer.decode(ids)
    served.serve(byte_level(), "{{ tools[0].function.name }}")  # fails without tools
    assert tokenizer.decode(await served.encode_chat(chat("hi", tools_json=json.dumps(tools)))) == "f"


CALLS = runner_pb2.ChatMessage(
    role=runner_pb2.CHAT_ROLE_ASSISTANT,
    tool_calls=[runner_pb2.ToolCall(name="f"), runner_pb2.ToolCall(name="f", arguments_json="{")],
)
WITH_CALLS = runner_pb2.Chat(messages=[*chat("a").messages, CALLS])
WITHOUT_ROLE = runner_pb2.Chat(messages=[runner_pb2.ChatMessage(content="a")])


@pytest.mark.parametrize(
    ("bad_chat", "reason", "field"),
    [
        (runner_pb2.Chat(), "EMPTY_PROMPT", "chat.messages"),
        (chat("hi", template="absent"), "BAD_CHAT", "chat"),
        (chat("hi", tools_json="{"), "BAD_CHAT", "chat.tools_json"),
        (chat("hi", template="x", tools_json='[{"type": "function"}]'), "BAD_CHAT", "chat.tools_json"),
        (chat("hi", tools_json="[" + "[]," * 40_000 + "1]"), "BAD_CHAT", "chat.tools_json"),
        (WITH_CALLS, "BAD_CHAT", "chat.messages[1].tool_calls[1].arguments_json"),
        (WITHOUT_ROLE, "BAD_CHAT", "chat.messages[0].role"),
    ],
    ids=range(7),
)
async def test_a_bad_chat_is_an_invalid_argument(
    served: ServedModel, bad_chat: runner_pb2.Chat, reason: str, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await served.encode_chat(bad_chat)
    assert (caught.value.reason, caught.value.field) == (reason, field)


async def test_without_a_template_or_tokenizer(served: ServedModel) -> None:
    served.serve(byte_level(), template="")
    with pytest.raises(InvalidArgument) as caught:
        await served.encode_chat(chat("hi"))
    assert caught.value.reason == "NO_CHAT_TEMPLATE"
    served.serve(None)
    for call in (served.encode("a"), served.text.constraint(*REGEX, frozenset(), 300)):
        with pytest.raises(NoTokenizer):
            await call


async def test_long_texts_are_encoded_and_too_long_ones_refused(served: ServedModel) -> None:
    text = "a long text " * 1000
    assert list(await served.encode(text)) == byte_level().encode(text).ids
    with pytest.raises(SequenceTooLong):
        await served.text.encode(text, max_tokens=100)


async def refused(served: ServedModel, text: str) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        await served.encode(text)
    assert (caught.value.reason, caught.value.field) == ("BAD_TEXT", "text")
    return caught.value


def hostile(split: str = "") -> Tokenizer:
    """Splits by an expression, or replaces each a by 10^12 characters."""
    tokenizer = byte_level()
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 4)
    return tokenizer


SLOW_TEXT = ("a" * 20 + "b") * 10_000


@pytest.mark.parametrize(
    ("split", "text", "cpu_s", "message"),
    [("", "aaa", 60, "too much memory"), ("(a+)+c", SLOW_TEXT, 0.5, "used more than")],
)
async def test_encoding_that_exceeds_a_limit_is_ended(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, split: str, text: str, cpu_s: float, message: str
) -> None:
    monkeypatch.setattr(tasks, "ENCODE", replace(ENCODE, max_memory_bytes=1 << 29, max_cpu_s=cpu_s))
    served.serve(hostile(split))
    assert message in (await refused(served, text)).message
    # The next text works.
    assert list(await served.encode("b")) == byte_level().encode("b").ids


async def test_an_encoding_ends_with_the_model(served: ServedModel) -> None:
    served.serve(hostile("(a+)+c"))
    await served.encode("b")
    encoding = asyncio.create_task(served.encode(SLOW_TEXT))
    await asyncio.sleep(0)
    served.text.close()
    with pytest.raises(Draining):
        await encoding


async def test_tenants_take_turns_however_many_texts_one_sends(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "ENCODE", replace(ENCODE, max_cpu_s=0.25, max_processes=1))
    served.serve(hostile("(a+)+c"))
    await served.encode("b")
    ended = []

    async def encode(name: str, text: str) -> None:
        served.tenant.set(name)
        with contextlib.suppress(InvalidArgument):
            await served.encode(text)
        ended.append(name)

    await asyncio.gather(*(encode("first", SLOW_TEXT) for _ in range(3)), encode("second", "b"))
    assert ended == ["first", "second", "first", "first"]


PANICS = "(a+)+$|(x+x+)+y"


async def test_a_panic_is_a_bad_text(served: ServedModel) -> None:
    """Ordinary expressions panic, too, on texts of ten million characters."""
    served.serve(hostile(PANICS))
    await refused(served, "a" * 60 + "!")
    assert list(await served.encode("b")) == byte_level().encode("b").ids


async def test_a_decoder_that_expands_tokens_is_not_used(served: ServedModel) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 4)
    served.serve(tokenizer)
    assert await served.text.tokenizer() is None
    with pytest.raises(NoTokenizer):
        await served.encode("a")


async def test_a_tokenizer_that_cannot_be_constrained_is_unsupported(served: ServedModel) -> None:
    served.serve(ctc())
    for _ in range(2):
        with pytest.raises(Unsupported, match="same text everywhere"):
            await served.text.constraint(*REGEX, frozenset(), 300)


async def test_constraints_belong_to_the_served_model(served: ServedModel) -> None:
    for size in (400, 500):
        new = await served.text.constraint(*REGEX, frozenset([399]), size)
        matcher = new()
        mask = await matcher.in_turn(matcher.allowed)
        assert len(mask) == -(-size // 8)
        texts = [byte_level().decode([n]) for n in range(332) if mask[n >> 3] >> (n & 7) & 1]
        assert texts and all(text.isdigit() or text == "\ufffd" for text in texts)
        served.serve(byte_level())
