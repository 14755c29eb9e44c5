"""The process in which chat templates run: tasks and answers are JSON.

Nothing of a task is there in the next one: an environment is made for each, and of the one before only the
template's code is kept, which does not change.

Templates get what the transformers library gives them: Jinja's sandbox with values that do not change, blocks
whose lines leave no blanks, `break` and `continue`, `{% generation %}` around what an assistant says,
`raise_exception`, `strftime_now`, and a `tojson` that escapes nothing for HTML.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
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

from service.text import task_loop


def answer(task: bytes) -> bytes:
    """Does one task: what a template makes of some names, or why it makes nothing of them."""
    asked = json.loads(task)
    return json.dumps(_answer(asked["source"], asked["names"], asked["max_output_characters"])).encode()


def render(source: str, names: Mapping[str, Any], max_characters: int) -> str:
    """What a template makes of some names.

    Raises:
        OverflowError: It is longer than that.
        Exception: Whatever the template does wrong.
    """
    environment = make_environment()
    template = environment.template_class.from_code(
        environment, _compiled(source), environment.make_globals(None)
    )
    parts: list[str] = []
    room = max_characters
    for part in template.generate(**names):
        room -= len(part)
        if room < 0:
            raise OverflowError(f"it wrote more than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


@functools.lru_cache(maxsize=1)
def _compiled(source: str) -> CodeType:
    return make_environment().compile(source)


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


def _answer(source: str, names: Mapping[str, Any], max_characters: int) -> dict[str, Any]:
    """`is_spent`: what it has taken may be missing in the next task."""
    try:
        return {"text": render(source, names, max_characters)}
    except MemoryError:
        return {"error": "it needs too much memory", "is_spent": True}
    except RecursionError:
        return {"error": "it is nested too deeply", "is_spent": True}
    except OverflowError as error:
        return {"error": str(error), "is_spent": True}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


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
    sys.exit(task_loop.main(answer))
