"""Which results of benchmarks the pages show."""

from __future__ import annotations

from benchmarks import tables
from benchmarks.results import name_of


def test_pages_show_the_results() -> None:
    for path, page in tables.pages(tables.results()).items():
        assert path.read_text("utf-8") == page, "python -m benchmarks.tables writes it"


def test_one_result_for_each_kind_of_cpu() -> None:
    """A full run writes to a name without a date, which git keeps the history of."""
    for path, result in tables.results().items():
        assert path.stem == name_of(result)
