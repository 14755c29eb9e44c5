"""Renders a chat template, which is a program of whoever made the model, where it can do no harm.

It runs in Jinja's sandbox, and that in a process of its own (`template_process.py`) with bounds on time,
memory and output, which has nothing of ours but the messages. What happens there is a `TemplateError` here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.v1 import types_pb2

from service.printable import escaped

DEFAULT = "default"
# Of the processor's time: a slow machine does not change what is refused.
MAX_CPU_S = 5
MAX_OUTPUT_CHARACTERS = 16 << 20
_MAX_MEMORY_BYTES = 1 << 30
# For a process that does not compute either.
_PATIENCE_S = 120.0
_MAX_REASON_CHARACTERS = 300
_KEPT_ENVIRONMENT = ("PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")


class TemplateError(Exception):
    """A prompt cannot be written as the template says. The message is one line that a terminal can show."""


def render_chat(template: types_pb2.ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt of some messages, up to where the model goes on.

    Args:
        template: What GetModelInfo has handed out.
        messages: Each with its `role` and `content`.

    Raises:
        TemplateError: There is no template for plain chat, or it failed, or went beyond a bound.
    """
    if DEFAULT not in template.sources:
        names = ", ".join(sorted(map(escaped, template.sources)))
        raise TemplateError(f"the model has chat templates named {names}, and none for plain chat")
    task = {
        "source": template.sources[DEFAULT],
        "names": {
            **template.special_tokens,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        },
        "max_cpu_s": MAX_CPU_S,
        "max_memory_bytes": _MAX_MEMORY_BYTES,
        "max_output_characters": MAX_OUTPUT_CHARACTERS,
    }
    answer = _run(task)
    if "text" not in answer:
        reason = escaped(str(answer.get("error")))[:_MAX_REASON_CHARACTERS]
        raise TemplateError(f"the model's chat template failed: {reason}")
    text = str(answer["text"])
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TemplateError("the model's chat template failed: it wrote half a character")
    return text


def _run(task: Mapping[str, Any]) -> dict[str, Any]:
    """What the process makes of a task. Raises TemplateError if it says nothing."""
    try:
        done = subprocess.run(
            # -P: nothing is imported from where the caller happens to be.
            [sys.executable, "-P", "-m", "service.cli.template_process"],
            input=json.dumps(task).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateError(f"the model's chat template took more than {_PATIENCE_S:.0f} s") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TemplateError(f"the model's chat template computed for more than {MAX_CPU_S} s")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise TemplateError(f"the model's chat template ended its process with status {done.returncode}")
    return answer


def _environment() -> dict[str, str]:
    """What Python and the local time need, and none of the caller's secrets."""
    path = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **kept}
