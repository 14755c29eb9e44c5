"""The tasks of sandboxed processes: each kind is declared here, with all its bounds.

Templates, grammars and tokenizers are untrusted programs, which may loop, leak or crash. A new kind is a
declaration here, and a module that runs its tasks (`task_loop`). `TaskPool` owns the processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskKind:
    """What runs tasks of a kind, and the limits of a process and of each of its tasks."""

    # Its `handler()` returns the function that runs a task (`task_loop`).
    module: str
    # CPU time of a task. Not elapsed time: a slow machine does not change what is refused.
    max_cpu_s: float
    # Address space of the process, its code included.
    max_memory_bytes: int
    max_result_bytes: int
    # A second one is started for a task that comes while another one runs.
    max_processes: int = 1
    # A process that has run so many tasks is replaced.
    max_tasks: float = math.inf
    # A process that gets no task for so long ends itself, and is reaped with the next task; 0: never.
    idle_s: float = 0.0
    # Elapsed time of a task: for a process that hangs without computing.
    timeout_s: float = 120.0
    # Whether a task, and with it the process, ends at once when its caller leaves. Otherwise the task runs to
    # its end: the process keeps what others need, and tasks are short.
    ends_with_caller: bool = True


# A process keeps the code of templates, and nothing of a prompt.
MAX_PROMPT_CHARACTERS = 16 << 20
RENDER = TaskKind(
    "service.text.template_process",
    max_cpu_s=5.0,
    max_memory_bytes=1 << 30,
    # A character has up to four bytes in UTF-8.
    max_result_bytes=4 * MAX_PROMPT_CHARACTERS + 4096,
    max_processes=2,
    max_tasks=1000,
    idle_s=60.0,
)
# Enough for ten million characters: a tokenizer encodes a million in a second or two, with some 170 bytes for
# each character. The largest known tokenizers load in about two seconds.
ENCODE = TaskKind(
    "service.text.tokenizer",
    max_cpu_s=20.0,
    max_memory_bytes=2 << 30,
    max_result_bytes=64 << 20,
    max_processes=2,
)
# A compilation and a mask usually take some milliseconds. A vocabulary of 150,000 tokens takes some 150 MiB.
# Two kinds, so that a slow compilation delays no sample that runs.
COMPILE = MASK = TaskKind(
    "service.text.grammar_process",
    max_cpu_s=2.0,
    max_memory_bytes=1 << 30,
    max_result_bytes=16 << 20,
    idle_s=300.0,
    ends_with_caller=False,
)
