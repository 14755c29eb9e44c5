"""Makes Triton's interpreter faster, without another result: what it repeats for each call is done once.

For each launch, and for each call of a function in a kernel, `tl.sum` for one, it looks through all
attributes of Triton's language for those that it has to replace: half of the time of these tests. In a
process that interprets, nothing else needs them as they were. For each operation it makes a dictionary of all
types. For each value it makes its shape anew, with an object for each size. And for each sum, difference and
product of integers it computes whether that overflows, but uses that in debug mode only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _replaced_once(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of `_patch_lang`: once and for good for each module of the language that functions use."""
    done: set[tuple[int, ...]] = set()

    @functools.cache
    def languages(function: Any) -> tuple[int, ...]:
        used = {id(value) for value in function.__globals__.values()}
        return tuple(id(module) for module in (tl, tl.core) if id(module) in used)

    def replace_once(function: Any) -> Any:
        used = languages(function)
        if used not in done:
            done.add(used)
            replace(function)
        # What undoes it at the end of a launch, with nothing to undo. Some versions undo nothing.
        return getattr(interpreter, "_LangPatchScope", object)()

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


def _share_shapes() -> None:
    """Values of one shape have one object for it, which nobody changes."""
    block, value = tl.core.block_type, tl.core.tensor
    init_block, init_value = block.__init__, value.__init__
    of_blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}
    of_values: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_of(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        known = of_blocks.get((element_ty.name, sizes))
        if known is None:
            init_block(self, element_ty, shape)
            of_blocks[element_ty.name, sizes] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def value_of(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - as Triton names it
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = of_values.get(sizes)
        if known is None:
            init_value(self, handle, type)
            of_values[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    block.__init__, value.__init__ = block_of, value_of


def _as_they_are(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Of `broadcast_impl_value`: two values of one shape."""

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return broadcast_others


def install() -> None:
    """Patch the interpreter of this process, once."""
    if getattr(interpreter, "is_fast", False):
        return
    interpreter._patch_lang = _replaced_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    _share_shapes()
    TritonSemantic.broadcast_impl_value = _as_they_are(TritonSemantic.broadcast_impl_value)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "it looks at overflows"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.is_fast = True
