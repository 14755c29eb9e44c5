"""Writes docs/python.md, the reference of the Python client, from its signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin, is_typeddict

import quire
from google.protobuf.message import Message
from quire import text

_HEAD = """# Python API

`make stubs` writes this page from the docstrings of the package `quire`. [The tutorial](tutorial.md) and
[the recipes](recipes.md) show how its parts go together.

`AsyncClient`, `AsyncSession`, `AsyncCache` and `AsyncExecution` are the same for asyncio: each method that
asks the server is awaited, and `async with client.prefill(...)` needs no inner await. Messages of the API,
such as `StepOutput`, are those of the [protos](../protos/quire/v1), with types for checkers; comments there
give meaning, unit and limits. `Accept`, `Cause`, `FinishReason`, `Policy`, `Priority` and `Prompt` are for
annotations.
"""
_ERRORS_END = """Each has `code`, `reason`, `message`, `metadata` (details of the reason, as strings),
`retry_delay_s` and `violations` (pairs of a field and what is wrong with it). [errors.md](errors.md) lists
the reasons.
"""
# By section, in the order of the page. What else is exported is an exception, a message of the API, or an
# alias for annotations.
_SECTIONS = {
    "Clients": ("Client", "Session", "Tls", "CallOptions"),
    "Caches": ("Cache", "Verified", "PrefillItem", "ScoreItem", "Scored"),
    "Options of a call": (
        "output_options",
        "token_mask",
        "verify_rows",
        "draft_probabilities",
        "draft_from_top",
    ),
    "Whole texts": ("Execution", "Generation", "Answer", "Chunk", "item", "TextSettings"),
    "Text as tokens": ("ModelTokenizer", "Detokenizer"),
    "Results": ("checked", "floats", "expert_ids"),
}
# Sections of a docstring become lists.
_LIST = re.compile(r"^(Args|Attributes|Raises):$")
_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*)")


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections(), *_errors()])


def _sections() -> Iterator[str]:
    for title, names in _SECTIONS.items():
        yield f"\n## {title}\n"
        for name in names:
            thing = getattr(quire, name, None) or getattr(text, name)
            yield from _described(name, thing, "###")
            if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
                yield from _methods(name, thing)


def _methods(owner: str, kind: type) -> Iterator[str]:
    """In the order of the source. Those of Caller, which clients and sessions have, are shown once."""
    kinds = [kind] if kind is quire.Session else reversed(kind.__mro__)
    for each in kinds:
        for name, member in vars(each).items():
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                prefix = owner.removeprefix("Model").removeprefix("Text").lower()
                yield from _described(f"{prefix}.{name}", member, "####")


def _described(name: str, thing: Any, heading: str) -> Iterator[str]:
    yield f"{heading} {name}\n"
    if signature := _signature(name, thing):
        yield f"```python\n{signature}\n```\n"
    if not is_typeddict(thing) or not (thing.__doc__ or "").startswith("dict("):
        yield from _docstring(thing)
    if inspect.isclass(thing) and "__init__" in vars(thing) and not dataclasses.is_dataclass(thing):
        yield from _docstring(thing.__init__)


def _signature(name: str, thing: Any) -> str:
    if is_typeddict(thing) or dataclasses.is_dataclass(thing):
        fields = {key: value for base in reversed(thing.__mro__) for key, value in _annotations(base).items()}
        return "\n".join(
            [f"class {name}:", *(f"    {key}: {_plain(value)}" for key, value in fields.items())]
        )
    if isinstance(thing, property) or _is_created_by_others(thing):
        return ""
    signature = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing)
    parameters = [*_parameters(signature)]
    returned = signature.return_annotation
    end = "" if inspect.isclass(thing) or returned == "None" else f" -> {_plain(returned)}"
    whole = f"{name}({', '.join(parameters)}){end}"
    if len(whole) <= 100:
        return whole
    return "\n".join([f"{name}(", *(f"    {one}," for one in parameters), f"){end}"])


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    """As they are written, with the `*` before those that need their name."""
    has_star = False
    for name, one in signature.parameters.items():
        if name == "self":
            continue
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        stars = "**" if one.kind is inspect.Parameter.VAR_KEYWORD else ""
        default = "" if one.default is inspect.Parameter.empty else f" = {one.default!r}"
        yield f"{stars}{name}: {_plain(one.annotation)}{default}"


def _plain(annotation: str) -> str:
    """A type without the modules of messages."""
    modules = r"\b(?:types|executor|runner|admin|duration)_pb2\.|\bUnpack\[(\w+)\]"
    return re.sub(modules, r"\1", annotation).replace("'", '"')


def _annotations(kind: type) -> dict[str, str]:
    found = inspect.get_annotations(kind)
    return {name: getattr(each, "__forward_arg__", None) or str(each) for name, each in found.items()}


def _is_created_by_others(thing: Any) -> bool:
    return inspect.isclass(thing) and (thing.__init__.__doc__ or "").startswith("Created by")


def _docstring(thing: Any) -> Iterator[str]:
    text = inspect.cleandoc(inspect.getdoc(thing) or "")
    if text.startswith("Created by"):
        return
    is_list = False
    for line in text.splitlines():
        if titled := _LIST.match(line):
            is_list = True
            yield f"{titled[1]}:\n"
        elif is_list and (entry := _ENTRY.match(line)):
            yield f"- `{entry[1]}`: {entry[2]}"
        elif is_list and line.startswith(" "):
            yield f"  {line.strip()}"
        else:
            is_list = is_list and not line
            yield line
    yield ""


def _errors() -> Iterator[str]:
    yield "\n## Errors\n"
    first, drawing, said = (sys.modules["quire.errors"].__doc__ or "").split("\n\n")
    yield f"{first}\n\n```\n{textwrap.dedent(drawing)}\n```\n\n{said}"
    yield _ERRORS_END


def undocumented() -> list[str]:
    """What the package exports, and this page does not have."""
    shown = {name for names in _SECTIONS.values() for name in names}
    exported = {name: getattr(quire, name) for name in quire.__all__ if not name.startswith("Async")}
    others = (quire.QuireError, Message)
    return [
        name
        for name, thing in exported.items()
        if not (name in shown or get_origin(thing) or (inspect.isclass(thing) and issubclass(thing, others)))
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
