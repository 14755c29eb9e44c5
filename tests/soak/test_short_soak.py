"""A few faults of the soak, in every run of the tests; `make soak` makes a thousand."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

import pytest

from tests.forks import for_others
from tests.soak.__main__ import on_disk, soak
from tests.soak.faults import DiskInjector
from tests.soak.options import HYBRID, TINY


@pytest.mark.timeout(280)
@pytest.mark.parametrize("model", [TINY, pytest.param(HYBRID, marks=pytest.mark.thorough)])
def test_a_few_faults_lose_nothing(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in for_others().items():
        monkeypatch.setenv(name, value)
    options = Namespace(
        model=model,
        faults=6,
        minutes=3.5,
        seed=7,
        callers=2,
        texts=4,
        workers=2,
        kv_pages=40,
        interval_s=0.2,
    )
    tally = asyncio.run(soak(options, tmp_path, DiskInjector, on_disk(tmp_path)))
    log = (tmp_path / "gateway.log").read_text(errors="replace")
    assert tally.is_clean(), f"{tally.details}\n{log[-8000:]}"
    assert tally.num_faults > tally.num_gateway_faults > 0, "of workers, too"
    assert tally.sequences and tally.had_adapters == (model == TINY) and tally.generated
    assert tally.disk_pages("written")
