"""Hostile chat templates are refused. What others render is in `test_chats`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from quire.v1 import types_pb2

from service.text import tasks
from service.text.chat_template import ChatTemplates, TemplateError
from service.text.tasks import RENDER
from service.text.template_process import render
from tests.chat_templates import render_chat
from tests.service.served import turns_of

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLENTY = 1 << 20


def outcome(write: Callable[[], str]) -> tuple[bool, str]:
    """Whether it succeeds, and the text or the error."""
    try:
        return True, write()
    except jinja2.TemplateError as error:
        return False, str(error)


def variables(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {**SPECIAL, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}


def template(source: str) -> types_pb2.ChatTemplate:
    return types_pb2.ChatTemplate(sources={"default": source}, special_tokens=SPECIAL)


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no \x1b[31m such role') }}", r"failed: no \\x1b\[31m such role"),
        ("{{ messages[0]['content'].foo.bar }}", "failed: .*has no attribute 'foo'"),
        ("{% for x in %}", "failed: line 1: Expected"),
        ("\n{% frobnicate %}", "failed: line 2: Encountered unknown tag 'frobnicate'"),
        ("{% include 'x' %}", "failed: no loader for this environment"),
        ("{{ 1 // 0 }}", "failed: "),
        (r"{{ '\ud800' }}", "failed: it wrote an unpaired surrogate"),
    ],
)
def test_an_error_of_a_template_is_one_printable_line(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        render_chat(template(source), USER)
    assert str(caught.value).isprintable()


# None may access Python's internals or the process's environment, or change its variables.
REACHING = [
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}{{ ''['__class__'].__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages|attr('__class__')|attr('__mro__') }}",
    "{{ self.__init__.__globals__['os'].environ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__func__.__globals__['sys'].modules }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace(__class__=1) %}reached",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}reached",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
]


@pytest.mark.parametrize("source", REACHING)
def test_a_template_accesses_only_its_variables(source: str) -> None:
    _, text = outcome(lambda: render(source, variables(USER), PLENTY))
    # A forbidden value is undefined, or an error.
    assert text == "" or re.search("unsafe|undefined|no attribute|underscore", text)


def test_the_process_imports_nothing_from_its_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("json", "jinja2", "service"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    assert render_chat(template("{{ messages[0].content }}"), USER) == "hi"


def test_a_value_that_cannot_be_written_as_json_is_refused() -> None:
    nested: Any = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TemplateError, match="nested too deeply"):
        render_chat(template("x"), [{"role": "user", "content": nested}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "wrote more than 1000000 characters"),
        ("{{ 'a' * 1000001 }}", "wrote more than 1000000 characters"),
        ("{{ 'a' * 10 ** 12 }}", "needs too much memory"),
        ("{% set a = ['a' * 10 ** 8] * 99 %}{% set b = a | join %}", "needs too much memory"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "failed|ended its process|crashed"),
    ],
)
def test_a_template_that_exceeds_a_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.setattr(tasks, "RENDER", replace(RENDER, max_memory_bytes=1 << 28))
    monkeypatch.setattr(tasks, "MAX_PROMPT_CHARACTERS", 1_000_000)
    with pytest.raises(TemplateError, match=message) as caught:
        render_chat(template(source), USER)
    assert len(str(caught.value)) < 400


async def test_others_run_while_a_long_chat_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing 14 MB at once took a tenth of a second."""
    templates = ChatTemplates()

    async def is_written(_work: Any, _tenant: str) -> str:
        return ""

    monkeypatch.setattr(templates, "_pool", SimpleNamespace(run=is_written))
    size = 1 << 22
    for messages in ([{"role": "user", "content": "ä" * size}], USER * (size >> 4)):
        _, turns = await turns_of(templates.render(template(""), messages))
        assert turns >= size >> 16
