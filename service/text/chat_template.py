"""Renders chat templates, which are untrusted programs of a model's authors.

They run in Jinja's sandbox, in a process of their own (`template_process.py`) with limits on CPU time, memory
and output. The process gets the messages and nothing else. Its failures become `TemplateError`s.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.v1 import types_pb2

from service.printable import escaped
from service.text import tasks
from service.text.task_pool import TaskPool
from service.text.task_process import TaskFailed, TaskProcess

DEFAULT = "default"
_MAX_REASON_CHARACTERS = 300
# Written at once, in a millisecond.
_SLICE_CHARACTERS = 1 << 16
_SUBJECT = "the model's chat template"


class TemplateError(Exception):
    """A template cannot be rendered. The message is one printable line."""


class TemplateRaised(TemplateError):
    """The template itself failed: with other variables it may not."""


class ChatTemplates:
    """Owns the processes. Used from one event loop."""

    def __init__(self) -> None:
        self._pool = TaskPool(tasks.RENDER)

    async def render(
        self,
        template: types_pb2.ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        *,
        name: str = DEFAULT,
        tools: Sequence[Any] | None = None,
        further: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        tenant: str = "",
    ) -> str:
        """The prompt, which ends where the model's answer begins. Cancelling the call ends the process.

        `further`: variables that only some templates know. Tenants take turns.

        Raises TemplateError if there is no template of this name or it exceeds a limit, TemplateRaised if it
        fails; Draining.
        """
        if name not in template.sources:
            names = ", ".join(sorted(map(escaped, template.sources)))
            wanted = "for plain chat" if name == DEFAULT else "of that name"
            raise TemplateError(f"the model has chat templates named {names}, and none {wanted}")
        variables = {
            **template.special_tokens,
            "documents": None,
            **further,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        task = {"source": template.sources[name], "max_characters": tasks.MAX_PROMPT_CHARACTERS}
        try:
            data = await _gathered(_task(task, variables, messages))
            return await self._pool.run(lambda process: _render(process, data), tenant)
        except TaskFailed as error:
            raise TemplateError(f"{_SUBJECT} {error}") from None
        except RecursionError:
            # Where it can just be parsed.
            raise TemplateError("what the chat has in JSON is nested too deeply") from None

    def close(self) -> None:
        """Ends the processes; running tasks fail. Idempotent."""
        self._pool.close()


def _task(
    task: Mapping[str, Any], variables: Mapping[str, Any], messages: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """The task in JSON. The text of a piece is short."""
    yield f'{json.dumps(task)[:-1]}, "variables": {json.dumps(variables)[:-1]}, "messages": ['
    separator = ""
    for message in messages:
        yield separator
        separator = ", "
        for number, (name, value) in enumerate(message.items()):
            yield f"{', ' if number else '{'}{json.dumps(name)}: "
            if not isinstance(value, str):
                yield json.dumps(value)
                continue
            yield '"'
            for at in range(0, len(value), _SLICE_CHARACTERS):
                # The text is from a protobuf message, so it can be encoded.
                yield json.dumps(value[at : at + _SLICE_CHARACTERS], ensure_ascii=False)[1:-1]
            yield '"'
        yield "}"
    yield "]}}"


async def _gathered(pieces: Iterable[str]) -> bytes:
    """All of them. Lets other tasks run meanwhile: a chat may have sixteen megabytes."""
    data, next_pause = bytearray(), _SLICE_CHARACTERS
    for piece in pieces:
        data += piece.encode()
        if len(data) >= next_pause:
            next_pause = len(data) + _SLICE_CHARACTERS
            await asyncio.sleep(0)
    return bytes(data)


async def _render(process: TaskProcess, task: bytes) -> str:
    """The text that the process writes. Raises TemplateError, TemplateRaised or TaskFailed."""
    kind, _, data = (await process.run(task)).partition(b"\n")
    text = data.decode(errors="replace")
    if kind == b"text":
        return text
    reason = f"{_SUBJECT} failed: {escaped(text)[:_MAX_REASON_CHARACTERS]}"
    if kind == b"last error":
        process.kill()
        raise TemplateError(reason)
    raise TemplateRaised(reason)
