"""What fits into memory: the weights; and the pages, as many as asked for or as there is room for."""

from __future__ import annotations

from dataclasses import dataclass

# Share of the memory that is free at the time, and the most of it, so that a machine stays usable for others.
_CPU_MEMORY_SHARE = 0.25
_CPU_MAX_BYTES = 4 << 30
# Beyond this a small model would spend more on accounting than on KV.
_MAX_CPU_PAGES = 16_384
_MAX_GPU_PAGES = 1 << 22


class KvSizingError(Exception):
    """The weights do not fit, or the pool cannot have the size that was asked for, or any useful one.

    The message names what is needed and what there is.
    """


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU with the weights loaded.

    Attributes:
        total_bytes: Of the device.
        free_bytes: Not taken by anybody, neither by this process nor by another.
        working_bytes: What steps need besides weights and KV.
        utilization: The share of the device that this process and all others together may come to take.
    """

    total_bytes: int
    free_bytes: int
    working_bytes: int
    utilization: float

    @property
    def budget_bytes(self) -> int:
        """What is left for KV; negative if that is nothing."""
        taken_bytes = self.total_bytes - self.free_bytes
        return int(self.total_bytes * self.utilization) - taken_bytes - self.working_bytes


# A sequence needs one, and a worker can be warmed up with one.
_LEAST_PAGES = 1


def available_bytes() -> int:
    """The machine's memory that can be had without taking it from others."""
    import psutil  # noqa: PLC0415 - here, since machines with a GPU may lack it

    return int(psutil.virtual_memory().available)


def check_weights_fit(model: str, needed_bytes: int, free_bytes: int) -> None:
    """Raises KvSizingError if the weights need more than what is free, of whichever memory they go to."""
    if needed_bytes > free_bytes:
        raise KvSizingError(
            f"the weights of {model} do not fit: they need {needed_bytes >> 20} MiB,"
            f" {free_bytes >> 20} MiB are free"
        )


def choose_num_pages(asked: int | None, bytes_per_page: int) -> int:
    """The number of pages in the machine's memory: the one asked for, or what fits a share of what is free.

    Raises KvSizingError if that does not fit or is nothing, or if not a single page does.
    """
    _check_asked(asked)
    free_bytes = available_bytes()
    if asked is not None:
        if asked * bytes_per_page > free_bytes:
            raise KvSizingError(
                f"kv_pages = {asked} needs {asked * bytes_per_page >> 20} MiB,"
                f" {free_bytes >> 20} MiB are available"
            )
        return asked
    budget_bytes = min(int(free_bytes * _CPU_MEMORY_SHARE), _CPU_MAX_BYTES)
    pages = min(budget_bytes // bytes_per_page, _MAX_CPU_PAGES)
    if pages < 1:
        raise KvSizingError(f"no KV page of {bytes_per_page} bytes fits in {budget_bytes} bytes of memory")
    return pages


def choose_num_gpu_pages(asked: int | None, bytes_per_page: int, memory: GpuMemory) -> int:
    """The number of pages on a GPU: the one asked for, or all that fit.

    Raises KvSizingError if that does not fit or is nothing, or if not a single page does.
    """
    _check_asked(asked)
    if asked is not None:
        spare_bytes = memory.free_bytes - memory.working_bytes
        if asked * bytes_per_page > spare_bytes:
            raise KvSizingError(
                f"kv_pages = {asked} needs {asked * bytes_per_page >> 20} MiB of GPU memory,"
                f" {max(0, spare_bytes) >> 20} MiB are free beside the {memory.working_bytes >> 20} MiB that"
                f" steps work in"
            )
        return asked
    pages = min(memory.budget_bytes // bytes_per_page, _MAX_GPU_PAGES)
    if pages < 1:
        raise KvSizingError(
            f"no KV page fits: {memory.utilization:.0%} of {memory.total_bytes >> 20} MiB"
            f" (gpu_memory_utilization) less {memory.total_bytes - memory.free_bytes >> 20} MiB that"
            f" the weights and others take and {memory.working_bytes >> 20} MiB that steps work in"
            f" leaves {memory.budget_bytes >> 20} MiB"
        )
    return pages


def _check_asked(asked: int | None) -> None:
    if asked is not None and asked < _LEAST_PAGES:
        raise KvSizingError(f"kv_pages = {asked}: must be at least {_LEAST_PAGES}")
