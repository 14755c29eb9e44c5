"""Makes Triton's interpreter faster, without another result: what it repeats for each call is done once.

For each call of a function in a kernel, `tl.sum` for one, it looks through all attributes of Triton's
language for those that it has to replace, and finds that it has done so: two fifths of the time of these
tests. For each operation it makes a dictionary of all types. And for each sum, difference and product of
integers it computes whether that overflows, but uses that in debug mode only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def _replaced_once(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of `_patch_lang`: once in a launch for each module of the language that functions use."""
    done: set[tuple[int, ...]] = set()
    launch = interpreter.GridExecutor.__call__

    @functools.cache
    def languages(function: Any) -> tuple[int, ...]:
        used = {id(value) for value in function.__globals__.values()}
        return tuple(id(module) for module in (tl, tl.core) if id(module) in used)

    def replace_once(function: Any) -> Any:
        used = languages(function)
        if used in done:
            # What undoes it at the end of a launch, with nothing to undo. Some versions undo nothing.
            return getattr(interpreter, "_LangPatchScope", object)()
        done.add(used)
        return replace(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        # At its end all is as before.
        done.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            done.clear()

    interpreter.GridExecutor.__call__ = launch_anew
    return replace_once


def _by_name(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of `_get_np_dtype`."""
    known: dict[str, Any] = {}

    def known_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = numpy_type(dtype)
        return found

    return known_type


def install() -> None:
    """Patch the interpreter of this process, once."""
    if getattr(interpreter, "is_fast", False):
        return
    interpreter._patch_lang = _replaced_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "it looks at overflows"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.is_fast = True
