"""A helper process that does not start is a fault of the server, not of the request that needed it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import structlog
from quire.v1 import types_pb2

from service.errors import HelperFailed
from service.text.chat_template import ChatTemplates
from service.text.constraints import Constraints, Grammar, Matcher
from service.text.task_process import TaskProcess
from service.text.text_model import TextModel
from tests.service.text.kinds import byte_level
from tests.service.text.test_task_process import ECHO, HOSTILE, is_gone, run
from workers.common import child_process, worker_pb2


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No module of ours can be imported, as while the server's files are replaced."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("raise ImportError('it was\\x1b replaced')")
    path = f"{tmp_path}:{child_process.import_path()}"
    monkeypatch.setattr(child_process, "import_path", lambda: path)


def test_one_that_ends_before_its_first_task_is_logged(broken: None) -> None:
    process = TaskProcess(HOSTILE)
    with structlog.testing.capture_logs() as lines, pytest.raises(HelperFailed):
        run(process, ECHO)
    assert is_gone(process.pid)
    (line,) = lines
    assert line["log_level"] == "error" and line["module"] == HOSTILE.module and line["status"] == 1
    assert line["error"] == r"ImportError: it was\x1b replaced"


def test_one_for_which_no_descriptor_is_left() -> None:
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with structlog.testing.capture_logs() as lines, contextlib.closing(asyncio.new_event_loop()) as loop:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
        try:
            with pytest.raises(HelperFailed):
                loop.run_until_complete(TaskProcess(HOSTILE).run(ECHO))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
    assert [line["error"] for line in lines] == ["Too many open files"]


@pytest.mark.parametrize("setup_task", [b"import os; os.abort()", b"result = 'x' * 2_000_000", b"1 / 0"])
def test_the_task_before_the_first_one_is_not_the_callers(setup_task: bytes) -> None:
    process = TaskProcess(HOSTILE, setup_task)
    with structlog.testing.capture_logs() as lines, pytest.raises(HelperFailed):
        run(process, ECHO)
    assert len(lines) == 1 and is_gone(process.pid)


async def render() -> None:
    with contextlib.closing(ChatTemplates()) as templates:
        await templates.render(types_pb2.ChatTemplate(sources={"default": "a"}), [])


async def constrain() -> None:
    with contextlib.closing(Constraints([b"a", b"b"], [])) as constraints:
        await constraints.matcher_factory("regex", "a", frozenset(), 2)


async def mask() -> None:
    """The process that computes masks is another than the one that checks grammars."""
    with contextlib.closing(Constraints([b"a", b"b"], [])) as constraints:
        matcher = Matcher(constraints, Grammar("regex", "a"), frozenset(), 2)
        await matcher.in_turn(matcher.allowed)


async def encode() -> None:
    ready = worker_pb2.WorkerReady(tokenizer_json=byte_level().to_str().encode())
    with contextlib.closing(TextModel(lambda: ready, lambda: "")) as text:
        await text.encode("a", max_tokens=10)


@pytest.mark.parametrize("call", [render, constrain, mask, encode])
async def test_every_user_of_one_gets_an_error_of_the_server(
    broken: None, call: Callable[[], Coroutine[None, None, None]]
) -> None:
    with structlog.testing.capture_logs() as lines, pytest.raises(HelperFailed) as failed:
        await call()
    assert failed.value.code == "INTERNAL"
    assert [line["event"] for line in lines] == ["a helper process did not start"]
