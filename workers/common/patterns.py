"""Matches the patterns of an adapter's or a model's config as Python's `re` does, in bounded time.

`re` takes exponential time for patterns such as (a|aa)+$b, and holds the interpreter meanwhile. `regex` gives
up after a time, and lets other threads run. What it would read in another way than `re` is refused, and so is
what it takes long to compile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import regex

_MAX_CHARACTERS, _MAX_QUOTED = 4096, 100
_ADVICE = "name the modules instead"
# What `regex` or a later `re` reads in another way: errors that are allowed ({e<=1}), classes by name and
# sets of sets in []; flags, comments and references to groups, which PEFT surrounds with groups of its own.
# And what takes memory and time to compile, for which there is no limit: more than 9 repetitions by number,
# and any number of a group, which may be one in the other.
_REFUSED = re.compile(
    r"\{(?!\d(,\d?)?\}|,\d\})|\)\??\{"
    r"|\[\[|\[:|--|\|\||&&|~~|\(\?[aiLmsux#(-]|\(\?P[=>]|\\[0-9g]"
)


class Patience:
    """How long all patterns of one config may take, in the time of this thread.

    Those of an adapter of 80 layers, with a pattern of ranks and of alphas for each module, take 1.5 s.

    Attributes:
        error: What is raised for a pattern that cannot be used.
    """

    def __init__(self, error: type[Exception], seconds: float = 10.0) -> None:
        self.error = error
        self._end_s = time.thread_time() + seconds

    def left_s(self) -> float:
        """Raises `error` when there is none left."""
        left_s = self._end_s - time.thread_time()
        if left_s <= 0:
            raise self.error(f"the patterns take too long to match: {_ADVICE}")
        return left_s


class Pattern:
    """A pattern for names of modules."""

    def __init__(self, text: str, patience: Patience) -> None:
        """Compile it. Raises `Patience.error` if it is not valid, or not supported."""
        patience.left_s()
        if len(text) > _MAX_CHARACTERS:
            raise patience.error(f"a pattern has more than {_MAX_CHARACTERS} characters: {_ADVICE}")
        shown = text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."
        if _REFUSED.search(text):
            raise patience.error(f"the pattern {shown} is not supported: {_ADVICE}")
        self._patience = patience
        try:
            re.compile(text)
            self._whole = regex.compile(text, cache_pattern=False)
            self._end = regex.compile(rf"(?:.*\.)?(?:{text})$", cache_pattern=False)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise patience.error(f"the pattern {shown} is not valid ({error}): {_ADVICE}") from None

    def matches(self, name: str) -> bool:
        """As `re.fullmatch(pattern, name)`. Raises `Patience.error` if it takes too long."""
        return self._fits(self._whole.fullmatch, name)

    def matches_start(self, name: str) -> bool:
        """As `re.match(pattern, name)`. Raises `Patience.error` if it takes too long."""
        return self._fits(self._whole.match, name)

    def matches_end(self, name: str) -> bool:
        r"""As `re.match(rf"(.*\.)?({pattern})$", name)`: all of it, or what follows a dot."""
        return self._fits(self._end.fullmatch, name)

    def _fits(self, match: Callable[..., object], name: str) -> bool:
        try:
            return match(name, timeout=self._patience.left_s(), concurrent=True) is not None
        except TimeoutError:
            raise self._patience.error(f"the patterns take too long to match: {_ADVICE}") from None
