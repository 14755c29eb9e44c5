"""A table that leaves out columns where the terminal is narrow."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from quire.cli.terminal import escaped
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text


class FittingTable:
    """A table with as many complete columns as fit into the console."""

    def __init__(
        self,
        names: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        first: Sequence[str],
        texts: Collection[str],
    ) -> None:
        """`first`: the most important columns, which come before the others where not all of them fit.

        `texts`: those that are no numbers.
        """
        self._names = names
        self._first = first
        self._texts = texts
        # As Text, because rich interprets markup in strings.
        self._rows = [
            [cell if isinstance(cell, Text) else Text(escaped(cell)) for cell in row] for row in rows
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown, gap = self._fitting(options.max_width)
        table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
        for name in (self._names[i] for i in shown):
            table.add_column(name, justify="left" if name in self._texts else "right", overflow="fold")
        for row in self._rows:
            table.add_row(*(row[i] for i in shown))
        yield table

    def _fitting(self, width: int) -> tuple[list[int], int]:
        """The indexes of the columns that fit, in order, and the number of blanks between two of them."""
        widths = [
            max([len(name), *(row[i].cell_len for row in self._rows)]) for i, name in enumerate(self._names)
        ]
        first = [self._names.index(name) for name in self._first if name in self._names]
        by_rank = first + [i for i in range(len(self._names)) if i not in first]
        gap = 2 if sum(widths[i] + 2 for i in first) - 2 <= width else 1
        ends = itertools.accumulate(widths[i] + gap for i in by_rank)
        count = sum(end - gap <= width for end in ends)
        return sorted(by_rank[: max(1, count)]), gap
