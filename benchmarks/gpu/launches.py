"""Launches of kernels as data, and how they are recorded instead of carried out, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from kernels import gpu_format, lora
from kernels.cuda import paged_attention
from kernels.cuda import variant as variants
from kernels.cuda.variant import Variant

_ALIGNMENT = 16
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Device:
    """What launches depend on.

    Attributes:
        capability: Such as (9, 0), that of an H100.
        multiprocessors: How many there are.
        shared_bytes: The shared memory that a program may use.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor as a kernel sees it: its dtype by name, and whether its address is a multiple of 16."""

    dtype: str
    is_aligned: bool


Argument = Pointer | int | float | None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with the types of its arguments, and so one that is compiled. Can be sent to a process.

    Attributes:
        module, kernel: Where it is.
        arguments: In order. Integers stand for all for which Triton compiles the same.
        constexprs, options: As pairs; see `Variant`.
    """

    module: str
    kernel: str
    arguments: tuple[Argument, ...]
    constexprs: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, variant: Variant, arguments: Sequence[Any]) -> Launch:
        """A launch of a variant with these arguments, the first of which is a tensor."""
        architecture = variants.architecture_of(arguments[0].device)
        kernel, function = variant.kernel, variant.kernel.fn
        # Of a kernel that is interpreted, they are what it was made with.
        given = getattr(kernel, "kwargs", None) or vars(kernel)
        any_value, any_address = (
            set(given.get(f"do_not_specialize{name}") or ()) for name in ("", "_on_alignment")
        )
        described = (
            _described(argument, any_value=name in any_value, any_address=name in any_address)
            for name, argument in zip(kernel.arg_names, arguments, strict=False)
        )
        return cls(
            function.__module__,
            function.__name__,
            tuple(described),
            tuple(variant.constexprs_of(architecture).items()),
            tuple(variant.options_of(architecture).items()),
        )


def _described(argument: Any, *, any_value: bool, any_address: bool) -> Argument:
    """An argument, or one that stands for it. `any_value`, `any_address`: the kernel is not specialised."""
    if isinstance(argument, torch.Tensor):
        dtype = str(argument.dtype).removeprefix("torch.")
        offset = argument.storage_offset() * argument.element_size()
        if argument.device.type != "meta":
            offset = argument.data_ptr()
        return Pointer(dtype, any_address or offset % _ALIGNMENT == 0)
    if isinstance(argument, int) and not isinstance(argument, bool):
        # Triton distinguishes 1, multiples of 16, and those that need 64 bits.
        beyond = _INT32_MAX + 1 if abs(argument) > _INT32_MAX else 0
        if any_value or argument % _ALIGNMENT:
            return 1 if argument == 1 and not any_value else beyond + _ALIGNMENT + 1
        return beyond + _ALIGNMENT
    assert argument is None or isinstance(argument, float), f"a kernel's argument {argument!r}"
    return 0.5 if isinstance(argument, float) else None


@contextmanager
def recording() -> Iterator[set[Launch]]:
    """Collects what is launched, with nothing launched."""
    found: set[Launch] = set()

    def record(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:  # noqa: ARG001 - as launched
        found.add(Launch.of(variant, arguments))

    with mock.patch.object(Variant, "launch", record):
        yield found


def _without_product(
    x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Torch's products launch none of our kernels. On "meta" they took a third of the time of a dry run."""
    return x.new_empty(*x.shape[:-1], len(weight))


@contextmanager
def as_on(device: Device) -> Iterator[None]:
    """Answers what operations ask of tensors, and kernels of the device they run on."""
    limits = paged_attention.DeviceLimits(device.multiprocessors, device.shared_bytes)
    architecture = 10 * device.capability[0] + device.capability[1]
    answers: list[tuple[Any, str, Any]] = [
        (paged_attention, "limits_of", lambda _: limits),
        (variants, "architecture_of", lambda _: architecture),
        (lora, "_has_triton_kernels", lambda _: True),
        (gpu_format, "is_gpu", lambda _: True),
        (torch.Tensor, "is_cuda", True),
        (torch.nn.functional, "linear", _without_product),
    ]
    with ExitStack() as stack:
        for answer in answers:
            stack.enter_context(mock.patch.object(*answer))
        yield
