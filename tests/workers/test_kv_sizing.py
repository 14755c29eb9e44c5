"""How many pages fit, and what is said where none does."""

from __future__ import annotations

import pytest

from workers.kv.sizing import (
    GpuMemory,
    KvSizingError,
    check_fits,
    choose_num_gpu_pages,
    choose_num_pages,
)

GIB = 1 << 30


def memory(*, free: int = 60 * GIB, working: int = 4 * GIB, utilization: float = 0.9) -> GpuMemory:
    return GpuMemory(80 * GIB, free, working, utilization)


def test_a_gpu_is_filled_up_to_its_share() -> None:
    # 72 may be taken; 20 are, and 4 are for steps.
    assert choose_num_gpu_pages(None, GIB, memory()) == 48
    assert choose_num_gpu_pages(None, GIB + 1, memory()) == 47
    assert choose_num_gpu_pages(None, GIB, memory(utilization=1.0)) == 56


def test_what_others_take_counts() -> None:
    assert choose_num_gpu_pages(None, GIB, memory(free=30 * GIB)) == 18


def test_a_number_that_is_asked_for_may_take_all_that_is_free() -> None:
    assert choose_num_gpu_pages(56, GIB, memory()) == 56
    with pytest.raises(
        KvSizingError, match="kv_pages = 57 needs 58368 MiB of GPU memory, 57344 MiB are free"
    ):
        choose_num_gpu_pages(57, GIB, memory())


def test_no_room_for_a_page_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        KvSizingError, match=r"30% of 81920 MiB \(gpu_memory_utilization\) less 20480 MiB .*4096"
    ):
        choose_num_gpu_pages(None, GIB, memory(utilization=0.3))
    with pytest.raises(KvSizingError, match="no KV page fits"):
        choose_num_gpu_pages(None, 49 * GIB, memory())


def test_on_the_cpu_too_large_a_number_is_refused() -> None:
    assert choose_num_pages(3, 1024) == 3
    with pytest.raises(KvSizingError, match=f"kv_pages = {1 << 30} needs"):
        choose_num_pages(1 << 30, 1 << 20)


def test_weights_may_take_all_that_is_free() -> None:
    check_fits("the weights of model", GIB, GIB)
    with pytest.raises(
        KvSizingError, match="weights of model do not fit: they need 2048 MiB, 1024 MiB are free"
    ):
        check_fits("the weights of model", 2 * GIB, GIB)
