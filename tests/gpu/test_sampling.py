"""The choice of tokens on the device against the one on the CPU, with a vocabulary of 152k."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.sizes import sized
from tests.kernels.cuda.test_device_sampling_cuda import SPECS, assert_as_on_cpu
from workers.outputs import TokenMask
from workers.sampling import SamplingRow

VOCAB = sized(151_936, 5007)
ROWS = sized(64, 2)


@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_every_setting_chooses_as_on_the_cpu(spread: float, device: torch.device) -> None:
    dice = random.Random(1)
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2)) * spread
    rows = []
    for index in range(ROWS):
        history = [dice.randrange(VOCAB) for _ in range(300)]
        mask = TokenMask(packed=dice.randbytes(VOCAB // 8 + 1)) if dice.random() < 0.3 else None
        rows.append(SamplingRow(SPECS[index % len(SPECS)], mask, index, history, 100))
    chosen = assert_as_on_cpu(logits, rows, str(device))
    assert len(set(chosen)) > ROWS // 4
