"""The process in which a chat template runs: a task as JSON on standard input, the answer on standard output.

Templates get what the transformers library gives them: Jinja's sandbox with values that do not change, blocks
whose lines leave no blanks, `break` and `continue`, `{% generation %}` around what an assistant says,
`raise_exception`, `strftime_now`, and a `tojson` that escapes nothing for HTML.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def main() -> int:
    """Answers one task. Returns the exit status; a template that computes for too long ends the process."""
    task = json.load(sys.stdin)
    _bound(task["max_cpu_s"], task["max_memory_bytes"])
    answer = _answer(task["source"], task["names"], task["max_output_characters"])
    json.dump(answer, sys.stdout)
    return 0


def render(source: str, names: Mapping[str, Any], max_characters: int) -> str:
    """What a template makes of some names.

    Raises:
        OverflowError: It is longer than that.
        Exception: Whatever the template does wrong.
    """
    parts: list[str] = []
    room = max_characters
    for part in make_environment().from_string(source).generate(**names):
        room -= len(part)
        if room < 0:
            raise OverflowError(f"it wrote more than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace
    )
    return environment


def _answer(source: str, names: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    try:
        return {"text": render(source, names, max_characters)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _bound(max_cpu_s: int, max_memory_bytes: int) -> None:
    """Bounds what this process can take from now on; it writes no files."""
    for what, bounds in (
        # With SIGXCPU first, which says why.
        (resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s + 1)),
        (resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes)),
        (resource.RLIMIT_FSIZE, (0, 0)),
        (resource.RLIMIT_CORE, (0, 0)),
    ):
        # Not every system has each of them.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, bounds)


class _Generation(Extension):
    """`{% generation %}`: marks what an assistant has said, for training. Written as it is."""

    tags = {"generation"}  # noqa: RUF012 - as in Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """See Jinja's Extension."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """Jinja's, without the names by which Python's own attributes could be reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"names in a namespace cannot begin with an underscore, got {name}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the local time, without a zone, as in transformers


if __name__ == "__main__":
    sys.exit(main())
