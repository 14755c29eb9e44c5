"""A plugin of pytest that writes what happens as it happens: `-p tests.gpu.progress --progress FILE`.

A line of JSON when a test begins and one when it has ended, so that a process that hangs or crashes loses
nothing, and it is known in which test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file."""
    parser.addoption("--progress", type=Path, required=True, help="file for lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write."""
    config.pluginmanager.register(_Writer(config.getoption("--progress").open("w", encoding="utf-8")))


class _Writer:
    """Owner of the open file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Of each test one line says how it went; set-up and teardown are named where they fail.
        if report.when == "call" or report.outcome != "passed":
            self._write(test=report.nodeid, outcome=report.outcome, message=_message(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(ended=nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", message=_message(report))

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of what went wrong."""
    if report.passed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return str(text).strip().partition("\n")[0]
