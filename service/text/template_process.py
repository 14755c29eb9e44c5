"""The process that renders chat templates. Tasks are JSON; a result is a line with its kind, and a text.

The kinds are `text`, `error`, and `last error`, after which the process must not run another task.

Tasks do not affect each other: each gets a new Jinja environment. Only the compiled code of templates, which
is immutable, is kept.

The environment is that of the transformers library: Jinja's sandbox with immutable values, trimmed blocks,
`break` and `continue`, `{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that does not
escape for HTML.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def run(task: bytes) -> bytes:
    """Runs one task: returns the rendered text or an error."""
    try:
        return b"text\n" + render(**json.loads(task)).encode()
    except MemoryError:
        # It may have used up the memory of the process.
        return b"last error\nit needs too much memory"
    except RecursionError:
        return b"last error\nit is nested too deeply"
    except OverflowError as error:
        return f"last error\n{error}".encode()
    except UnicodeEncodeError:
        return b"error\nit wrote an unpaired surrogate"
    except jinja2.TemplateSyntaxError as error:
        text = f"line {error.lineno}: {error.message}"
    except Exception as error:
        text = str(error) or type(error).__name__
    return b"error\n" + text.encode(errors="replace")


def render(source: str, variables: Mapping[str, Any], max_characters: int) -> str:
    """Raises OverflowError for a text of more than `max_characters`, and any error of the template."""
    environment = make_environment()
    template = environment.template_class.from_code(
        environment, _compiled(source), environment.make_globals(None)
    )
    parts: list[str] = []
    characters_left = max_characters
    for part in template.generate(variables):
        characters_left -= len(part)
        if characters_left < 0:
            raise OverflowError(f"it wrote more than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> CodeType:
    return make_environment().compile(source)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace
    )
    return environment


class _Generation(Extension):
    """`{% generation %}` marks an assistant's output for training. Its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as in Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """Jinja's namespace, without names that reach Python's own attributes."""

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


def handler() -> Callable[[bytes], bytes]:
    """See `task_loop`."""
    return run
