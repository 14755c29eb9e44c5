"""Sizes memory: whether the weights fit, and how many pages and recurrent states there are."""

from __future__ import annotations

from dataclasses import dataclass

from workers.common.machine_limits import available_bytes

# Limits of the KV pool in main memory, as a share of the free memory and in bytes, so that enough is left for
# other programs.
_CPU_MEMORY_SHARE = 0.25
_CPU_MAX_BYTES = 4 << 30
# With more pages a small model would need more memory for accounting than for KV.
_MAX_CPU_PAGES = 16_384
_MAX_GPU_PAGES = 1 << 22


class KvSizingError(Exception):
    """The weights, the requested pool, or even the smallest pool do not fit.

    The message states the needed and the available memory.
    """


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU with the weights loaded.

    Attributes:
        total_bytes: Of the device.
        free_bytes: Not used by this or any other process.
        working_bytes: Memory for steps, besides weights and KV.
        utilization: The share of the device's memory that all processes together may use.
    """

    total_bytes: int
    free_bytes: int
    working_bytes: int
    utilization: float

    @property
    def budget_bytes(self) -> int:
        """The memory left for KV. Negative if there is none."""
        taken_bytes = self.total_bytes - self.free_bytes
        return int(self.total_bytes * self.utilization) - taken_bytes - self.working_bytes


# A sequence needs one page, and so does the warm-up.
_MIN_PAGES = 1
# Recurrent states for eight running forwards, beside the snapshots.
_MIN_STATES = 24
# The most tokens from one snapshot to the next: a truncation or a reused prefix may compute them again.
_MAX_STATE_SPACING = 512


@dataclass(frozen=True, slots=True)
class StateSizes:
    """How many recurrent states there are for a pool of pages.

    The distance of snapshots is chosen so that one takes about the memory of the KV of the tokens in between.

    Attributes:
        bytes_per_state: Of all layers. 0: there are no recurrent layers.
        kv_bytes_per_page: Of all layers with keys and values.
        page_size: Tokens.
    """

    bytes_per_state: int
    kv_bytes_per_page: int
    page_size: int

    @property
    def spacing(self) -> int:
        """The tokens from one snapshot to the next: full pages."""
        tokens = self.bytes_per_state * self.page_size // max(1, self.kv_bytes_per_page)
        pages = -(-min(tokens, _MAX_STATE_SPACING) // self.page_size)
        return max(1, pages) * self.page_size

    @property
    def bytes_per_page(self) -> int:
        """The bytes of a page and of its share of the states."""
        states = -(-self.bytes_per_state * self.page_size // self.spacing)
        return self.kv_bytes_per_page + states

    @property
    def fixed_bytes(self) -> int:
        """The bytes of the states that exist with any number of pages."""
        return _MIN_STATES * self.bytes_per_state

    def num_states(self, num_pages: int) -> int:
        """One for each snapshot in `num_pages` pages, and those for a few running forwards."""
        return _MIN_STATES + num_pages * self.page_size // self.spacing


def check_fits(what: str, needed_bytes: int, free_bytes: int) -> None:
    """Raises KvSizingError if `what` needs more than `free_bytes`."""
    if needed_bytes > free_bytes:
        raise KvSizingError(
            f"{what} do not fit: they need {needed_bytes >> 20} MiB, {free_bytes >> 20} MiB are free"
        )


def choose_num_pages(asked: int | None, bytes_per_page: int, fixed_bytes: int = 0) -> int:
    """The number of pages in main memory: as requested, or what fits a share of the free memory.

    `fixed_bytes`: what is needed with any number of pages.

    Raises KvSizingError if that does not fit, or is less than one page.
    """
    _check_asked(asked)
    free_bytes = max(0, available_bytes() - fixed_bytes)
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
    """The number of pages on a GPU: as requested, or all that fit.

    Raises KvSizingError if that does not fit, or is less than one page.
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
    if asked is not None and asked < _MIN_PAGES:
        raise KvSizingError(f"kv_pages = {asked}: must be at least {_MIN_PAGES}")
