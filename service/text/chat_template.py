"""Renders a chat template, which is a program of whoever made the model, where it can do no harm.

It runs in Jinja's sandbox, and that in a process of its own (`template_process.py`) with bounds on time,
memory and output, which has nothing of ours but the messages. What happens there is a `TemplateError` here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.v1 import types_pb2

from service.printable import escaped
from service.text.task_process import Bounds, TaskFailed, TaskProcess

DEFAULT = "default"
MAX_CPU_S = 5.0
MAX_OUTPUT_CHARACTERS = 16 << 20
_MAX_MEMORY_BYTES = 1 << 30
# JSON writes a character in twelve bytes at most.
_MAX_JSON_BYTES = 12
_MAX_REASON_CHARACTERS = 300
_FAILED = "the model's chat template"


class TemplateError(Exception):
    """A prompt cannot be written as the template says. The message is one line that a terminal can show."""


def render_chat(
    template: types_pb2.ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    name: str = DEFAULT,
    tools: Sequence[Any] | None = None,
) -> str:
    """The prompt of some messages, up to where the model goes on. Starts a process for it, and blocks.

    Args:
        template: What GetModelInfo has handed out.
        messages: Each with its `role` and `content`.
        name: Which of the model's templates.
        tools: What the model may call, as the template expects it.

    Raises:
        TemplateError: There is no such template, or it failed, or went beyond a bound.
    """
    task = make_task(template, messages, name=name, tools=tools)
    process = new_process()
    try:
        return read_answer(ask(process, task))
    finally:
        process.end()


def new_process() -> TaskProcess:
    """A process for templates."""
    max_answer_bytes = _MAX_JSON_BYTES * MAX_OUTPUT_CHARACTERS + 4096
    return TaskProcess(
        "service.text.template_process", Bounds(MAX_CPU_S, _MAX_MEMORY_BYTES, max_answer_bytes)
    )


def make_task(
    template: types_pb2.ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    name: str = DEFAULT,
    tools: Sequence[Any] | None = None,
) -> bytes:
    """What the process is asked; see `render_chat`. Raises TemplateError if there is no such template."""
    if name not in template.sources:
        names = ", ".join(sorted(map(escaped, template.sources)))
        wanted = "for plain chat" if name == DEFAULT else "of that name"
        raise TemplateError(f"the model has chat templates named {names}, and none {wanted}")
    task = {
        "source": template.sources[name],
        "names": {
            **template.special_tokens,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
        },
        "max_output_characters": MAX_OUTPUT_CHARACTERS,
    }
    return json.dumps(task).encode()


def ask(process: TaskProcess, task: bytes) -> Mapping[str, Any]:
    """What a process says to a task; for `read_answer`. Blocks. Raises TemplateError: the process is gone."""
    try:
        said = json.loads(process.ask(task))
    except TaskFailed as error:
        raise TemplateError(f"{_FAILED} {error}") from error
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {"error": "it said nothing", "is_spent": True}


def read_answer(said: Mapping[str, Any]) -> str:
    """The prompt. Raises TemplateError."""
    if "text" not in said:
        reason = escaped(str(said.get("error")))[:_MAX_REASON_CHARACTERS]
        raise TemplateError(f"{_FAILED} failed: {reason}")
    text = str(said["text"])
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TemplateError(f"{_FAILED} failed: it wrote half a character") from None
    return text
