"""Prompts from reused processes: callers do not see each other's data, and no template delays others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest
from quire.v1 import types_pb2

from service.errors import Draining
from service.text import tasks, template_process
from service.text.chat_template import ChatTemplates, TemplateError
from service.text.tasks import RENDER

PLAIN = "{{ messages[0].content }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def templates() -> AsyncIterator[ChatTemplates]:
    templates = ChatTemplates()
    yield templates
    templates.close()
    assert not children()


def children() -> list[int]:
    """The running processes: one that has ended itself is not reaped before the next task."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess):
            if "template_process" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def pids(templates: ChatTemplates) -> list[int]:
    """Of the idle processes."""
    return [process.pid for process in templates._pool.idle if process.pid is not None]


async def write(templates: ChatTemplates, source: str, content: str = "hi") -> str:
    template = types_pb2.ChatTemplate(sources={"default": source}, special_tokens={"bos_token": "<s>"})
    return await templates.render(template, [{"role": "user", "content": content}])


# Each tries to store the content somewhere, and to read what an earlier prompt stored.
STORING = [
    "{{ kept }}{% set kept = messages[0].content %}",
    "{% macro m(kept=[]) %}{{ kept }}{{ kept.append(messages[0].content) }}{% endmacro %}{{ m() }}",
    "{{ namespace.kept }}{% set ns = namespace() %}{% set ns.kept = messages[0].content %}",
    "{{ namespace.kept }}{% set namespace.kept = messages[0].content %}",
    "{{ cycler.kept }}{% set cycler.kept = messages[0].content %}",
    "{{ self.kept }}{{ self.update({'kept': messages[0].content}) }}",
    "{% set l = [] %}{{ l }}{{ l.append(messages[0].content) }}",
    "{% set c = [1, [2]] %}{{ c }}{{ c[1].append(messages[0].content) }}",
    "{% set d = {'a': {}} %}{{ d }}{{ d.a.update(kept=messages[0].content) }}",
    "{{ dict.kept }}{{ dict.__setattr__(dict, 'kept', messages[0].content) }}",
    "{{ bos_token.kept }}{{ lipsum.__globals__.update(kept=messages[0].content) }}",
    "{{ raise_exception.kept }}{{ raise_exception.__dict__.update(kept=messages[0].content) }}",
    "{% block b %}{{ kept }}{% set kept = messages[0].content %}{% endblock %}",
    "{{ strftime_now('%Y').kept }}{{ messages[0].update(kept=messages[0].content) }}",
    "{% set j = joiner(messages[0].content) %}{{ joiner.sep }}{{ j() }}",
]


@pytest.mark.parametrize("source", STORING)
def test_prompts_do_not_affect_each_other(source: str) -> None:
    # As the process does with successive tasks.
    results = []
    for content in ("planted secret", "another"):
        variables = {"messages": [{"role": "user", "content": content}], "bos_token": "<s>"}
        task = {"source": source, "variables": variables, "max_characters": 1000}
        results.append(template_process.run(json.dumps(task).encode()).decode())
    assert "planted" not in results[1]
    assert results[1] == results[0].replace("planted secret", "another")


@pytest.mark.parametrize("source", [ENDLESS, "{{ (9 ** (9 ** 9)) is even }}", "{{ 'a' * 10 ** 12 }}"])
async def test_a_template_that_exceeds_a_limit_does_not_affect_others(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(tasks, "RENDER", replace(RENDER, max_cpu_s=0.5))
    templates = ChatTemplates()
    hostile = asyncio.create_task(write(templates, source))
    # Others get their prompts meanwhile.
    assert await write(templates, PLAIN, "a") == "a"
    with pytest.raises(TemplateError, match=r"used more than 0\.5 s of CPU time|too much memory"):
        await hostile
    assert await write(templates, PLAIN, "b") == "b"
    # Only the process of the good template is left.
    assert len(children()) == 1
    templates.close()


async def test_cancelling_twice_keeps_the_turn_until_the_process_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()
    wait = subprocess.Popen.wait

    def slow(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert may_end.wait(60)
        return wait(process, timeout)

    # Else they would end by themselves, soon enough.
    monkeypatch.setattr(tasks, "RENDER", replace(RENDER, max_cpu_s=1000))
    templates = ChatTemplates()
    monkeypatch.setattr(subprocess.Popen, "wait", slow)
    running = [asyncio.create_task(write(templates, ENDLESS)) for _ in range(RENDER.max_processes)]
    while len(children()) < RENDER.max_processes:
        await asyncio.sleep(0.01)
    waiting = asyncio.create_task(write(templates, PLAIN, "a"))
    for _ in range(3):
        for one in running:
            one.cancel()
        await asyncio.sleep(0.01)
    assert not waiting.done() and not any(one.done() for one in running)
    may_end.set()
    assert await waiting == "a"
    await asyncio.wait(running)
    assert all(one.cancelled() for one in running)
    templates.close()
    assert not children()


async def test_a_tenant_with_slow_templates_keeps_no_other_waiting(
    templates: ChatTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it sends, one process is left for the others."""
    template = types_pb2.ChatTemplate(sources={"default": ENDLESS})
    slow = [
        asyncio.create_task(templates.render(template, [], tenant="slow"))
        for _ in range(RENDER.max_processes + 1)
    ]
    while not children():
        await asyncio.sleep(0.01)
    template = types_pb2.ChatTemplate(sources={"default": PLAIN})
    for _ in range(3):
        assert await templates.render(template, [{"content": "hi"}], tenant="other") == "hi"
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_a_process_is_replaced_after_max_tasks_and_ended_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "RENDER", replace(RENDER, max_tasks=2, idle_s=0.05))
    templates = ChatTemplates()
    await write(templates, PLAIN)
    assert len(pids(templates)) == 1
    await write(templates, PLAIN)
    assert not children()
    await write(templates, PLAIN)
    while children():
        await asyncio.sleep(0.01)
    assert await write(templates, PLAIN, "a") == "a"
    templates.close()
    assert not children()


async def test_closing_fails_running_and_waiting_tasks(templates: ChatTemplates) -> None:
    hostile = [asyncio.create_task(write(templates, ENDLESS)) for _ in range(RENDER.max_processes + 1)]
    while len(children()) < RENDER.max_processes:
        await asyncio.sleep(0.01)
    templates.close()
    for task in (*hostile, asyncio.create_task(write(templates, PLAIN))):
        with pytest.raises(Draining):
            await task
    assert not children()
