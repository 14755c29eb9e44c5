"""Prompts from processes that stay: what a caller sends is nobody else's, and no template holds up others."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
from quire.v1 import types_pb2

from service.text import chat_template, template_pool, template_process
from service.text.chat_template import TemplateError, make_task, render_chat
from service.text.template_pool import TemplatePool
from tests.chat_templates import TEMPLATES

PLAIN = "{{ messages[0].content }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def pool() -> AsyncIterator[TemplatePool]:
    pool = TemplatePool()
    yield pool
    pool.close()
    assert not children()


def children() -> list[int]:
    processes = psutil.Process().children(recursive=True)
    return [process.pid for process in processes if "template_process" in " ".join(process.cmdline())]


async def write(pool: TemplatePool, source: str, content: str = "hi") -> str:
    return await pool.write(source, task(source, content))


def task(source: str, content: str) -> bytes:
    return make_task(template(source), [{"role": "user", "content": content}])


def template(source: str) -> types_pb2.ChatTemplate:
    return types_pb2.ChatTemplate(sources={"default": source}, special_tokens={"bos_token": "<s>"})


async def test_it_writes_what_a_process_of_its_own_writes(pool: TemplatePool) -> None:
    messages = [{"role": "user", "content": "<b>\u20ac\n{{ x }}"}]
    source = TEMPLATES["qwen"]
    alone = render_chat(template(source), messages)
    for _ in range(2):
        assert await pool.write(source, make_task(template(source), messages)) == alone


async def test_a_process_stays_and_writes_for_one_after_another(pool: TemplatePool) -> None:
    assert await write(pool, PLAIN, "a") == "a"
    pids = pool.pids
    for content in ("b", "\u20ac" * 100_000, ""):
        assert await write(pool, PLAIN, content) == content
    # An error of the caller's costs no process.
    with pytest.raises(TemplateError, match="failed: no"):
        await write(pool, "{{ raise_exception('no') }}")
    with pytest.raises(TemplateError, match="failed: no"):
        await write(pool, "{{ raise_exception('no') }}")
    assert await write(pool, PLAIN, "c") == "c"
    assert set(pids) < set(pool.pids)


# Whatever a template may try to write down somewhere, it does not find again.
REMEMBERING = [
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


@pytest.mark.parametrize("source", REMEMBERING)
def test_nothing_of_one_prompt_is_in_the_next(source: str) -> None:
    # What the process does with one task after another.
    said = [
        template_process.answer(task(source, content)).decode() for content in ("planted secret", "another")
    ]
    assert "planted" not in said[1]
    assert said[1] == said[0].replace("planted secret", "another")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (ENDLESS, "computed for more than 0.5 s"),
        ("{{ 'a' * 10 ** 12 }}", "needs too much memory"),
        ("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "wrote more than 1000000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    ],
)
async def test_a_template_that_takes_too_much_harms_nobody(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.5)
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARACTERS", 1_000_000)
    hostile = asyncio.create_task(write(pool, source))
    # Meanwhile others get their prompts, and the loop turns.
    assert await write(pool, PLAIN, "a") == "a"
    with pytest.raises(TemplateError, match=said):
        await hostile
    assert await write(pool, PLAIN, "b") == "b"
    # Only the one that behaves is still there.
    assert len(children()) == 1


async def test_more_callers_than_processes_take_turns(pool: TemplatePool) -> None:
    sources = [PLAIN, PLAIN + " ", PLAIN + "."]
    contents = [str(number) for number in range(12)]
    pairs = list(zip(itertools.cycle(sources), contents, strict=False))
    said = await asyncio.gather(*(write(pool, source, content) for source, content in pairs))
    assert said == [source.replace(PLAIN, content) for source, content in pairs]
    assert len(children()) <= template_pool.MAX_PROCESSES


async def test_cancelling_ends_the_process_at_once(pool: TemplatePool) -> None:
    hostile = [asyncio.create_task(write(pool, ENDLESS)) for _ in range(3)]
    while len(children()) < 2:
        await asyncio.sleep(0.01)
    for one in hostile:
        one.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    assert await write(pool, PLAIN, "a") == "a"
    assert len(children()) == 1


async def test_one_that_died_meanwhile_is_replaced(pool: TemplatePool) -> None:
    assert await write(pool, PLAIN, "a") == "a"
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert await write(pool, PLAIN, "b") == "b"
    assert pool.pids != [pid]


async def test_it_is_replaced_after_so_many_prompts_and_when_nobody_wants_it(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_pool, "MAX_TASKS", 2)
    monkeypatch.setattr(template_pool, "IDLE_S", 0.05)
    await write(pool, PLAIN)
    assert len(pool.pids) == 1
    await write(pool, PLAIN)
    assert not children()
    await write(pool, PLAIN)
    while children():
        await asyncio.sleep(0.01)
    assert await write(pool, PLAIN, "a") == "a"


async def test_closing_ends_what_is_under_way(pool: TemplatePool) -> None:
    hostile = asyncio.create_task(write(pool, ENDLESS))
    while not children():
        await asyncio.sleep(0.01)
    pool.close()
    with pytest.raises(TemplateError):
        await hostile
    assert not children()
