"""Renders chat templates, which are untrusted programs of a model's authors.

They run in Jinja's sandbox, in a process of their own (`template_process.py`) with limits on CPU time, memory
and output. The process gets the messages and nothing else. Its failures become `TemplateError`s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.v1 import types_pb2

from service.printable import escaped
from service.text.task_process import ProcessLimits, TaskFailed, TaskPool, TaskProcess

DEFAULT = "default"
MAX_PROCESSES = 2
MAX_TASKS = 1000
IDLE_S = 60.0
MAX_CPU_S = 5.0
MAX_OUTPUT_CHARACTERS = 16 << 20
MAX_MEMORY_BYTES = 1 << 30
# In UTF-8.
_MAX_CHARACTER_BYTES = 4
_MAX_REASON_CHARACTERS = 300
_SUBJECT = "the model's chat template"


class TemplateError(Exception):
    """A template cannot be rendered. The message is one printable line."""


class TemplateRaised(TemplateError):
    """The template itself failed: with other variables it may not."""


class ChatTemplates:
    """Owns the processes. Used from one event loop."""

    def __init__(self) -> None:
        self._pool = TaskPool(_new_process, MAX_PROCESSES, MAX_TASKS)

    async def render(
        self,
        template: types_pb2.ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        *,
        name: str = DEFAULT,
        tools: Sequence[Any] | None = None,
        tenant: str = "",
    ) -> str:
        """The prompt, which ends where the model's answer begins. Cancelling the call ends the process.

        Tenants take turns.

        Raises TemplateError if there is no template of this name or it exceeds a limit, TemplateRaised if it
        fails; Draining.
        """
        if name not in template.sources:
            names = ", ".join(sorted(map(escaped, template.sources)))
            wanted = "for plain chat" if name == DEFAULT else "of that name"
            raise TemplateError(f"the model has chat templates named {names}, and none {wanted}")
        variables = {
            **template.special_tokens,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        task = {
            "source": template.sources[name],
            "variables": variables,
            "max_characters": MAX_OUTPUT_CHARACTERS,
        }
        data = json.dumps(task).encode()
        try:
            return await self._pool.run(lambda process: _render(process, data), tenant)
        except TaskFailed as error:
            raise TemplateError(f"{_SUBJECT} {error}") from None

    def close(self) -> None:
        """Ends the processes; running tasks fail. Idempotent."""
        self._pool.close()


def _new_process() -> TaskProcess:
    max_result_bytes = _MAX_CHARACTER_BYTES * MAX_OUTPUT_CHARACTERS + 4096
    limits = ProcessLimits(MAX_CPU_S, MAX_MEMORY_BYTES, max_result_bytes, idle_s=IDLE_S)
    return TaskProcess("service.text.template_process", limits)


def _render(process: TaskProcess, task: bytes) -> str:
    """The text that the process writes. Blocks. Raises TemplateError, TemplateRaised or TaskFailed."""
    kind, _, data = process.run(task).partition(b"\n")
    text = data.decode(errors="replace")
    if kind == b"text":
        return text
    reason = f"{_SUBJECT} failed: {escaped(text)[:_MAX_REASON_CHARACTERS]}"
    if kind == b"last error":
        process.close()
        raise TemplateError(reason)
    raise TemplateRaised(reason)
