"""The threads of the compiled kernels: any number, called from any thread, and in a forked process."""

from __future__ import annotations

import os
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.linear import linear
from kernels.packed_weight import PackedWeight
from tests.kernels.instruction_sets import need_compiled


@pytest.fixture
def product() -> tuple[torch.Tensor, PackedWeight, torch.Tensor]:
    """Rows, a weight that is large enough for several threads, and their product."""
    need_compiled()
    x, weight = torch.randn(5, 640), PackedWeight(torch.randn(1000, 640))
    return x, weight, linear(x, weight)


@pytest.mark.parametrize("threads", [1, 2, 3, 13])
def test_any_number_of_threads(
    threads: int, product: tuple[torch.Tensor, PackedWeight, torch.Tensor]
) -> None:
    x, weight, expected = product
    torch.set_num_threads(threads)
    assert all(torch.equal(linear(x, weight), expected) for _ in range(20))


def test_a_call_on_fewer_threads_after_one_on_more(
    product: tuple[torch.Tensor, PackedWeight, torch.Tensor],
) -> None:
    """A thread of the first call may still be leaving it when the second one begins."""
    x, weight, expected = product
    for call in range(2000):
        torch.set_num_threads((5, 2, 3)[call % 3])
        assert torch.equal(linear(x, weight), expected)


def test_calls_of_several_threads_at_once(product: tuple[torch.Tensor, PackedWeight, torch.Tensor]) -> None:
    x, weight, expected = product
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: linear(x, weight), range(200))
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process(product: tuple[torch.Tensor, PackedWeight, torch.Tensor]) -> None:
    x, weight, expected = product
    torch.set_num_threads(2)
    assert torch.equal(linear(x, weight), expected)
    child = os.fork()
    if child == 0:
        try:
            same = bool((linear(x, weight).numpy() == expected.numpy()).all())
        except BaseException:
            traceback.print_exc()
            os._exit(2)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
