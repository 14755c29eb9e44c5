"""Which worker takes a new sequence."""

from __future__ import annotations

from service.caches.placement import PAGE_TOKENS, PrefixAffinity, WorkerView, choose_worker, pages_for

PROMPT = list(range(3 * PAGE_TOKENS + 5))


def test_nobody_takes_it_where_there_is_nobody() -> None:
    assert choose_worker([], PROMPT, PrefixAffinity()) is None


def test_the_most_free_pages_less_what_is_queued() -> None:
    a = WorkerView("a", 1, pages_available=10, pages_queued=6)
    b = WorkerView("b", 2, pages_available=8)
    assert choose_worker([a, b], PROMPT, PrefixAffinity()) is b
    a.pages_queued = 0
    assert choose_worker([a, b], PROMPT, PrefixAffinity()) is a


def test_of_equals_the_one_with_fewer_sequences() -> None:
    a, b = WorkerView("a", 1, 10, sequences=3), WorkerView("b", 2, 10, sequences=2)
    assert choose_worker([a, b], PROMPT, PrefixAffinity()) is b


def test_the_holder_of_the_longest_prefix_takes_it_if_the_rest_fits() -> None:
    a, b = WorkerView("a", 1, 1), WorkerView("b", 2, 100)
    affinity = PrefixAffinity()
    affinity.record(PROMPT[: 3 * PAGE_TOKENS], a)
    assert choose_worker([a, b], PROMPT, affinity) is a, "one page is missing, one is free"
    a.pages_queued = 1
    assert choose_worker([a, b], PROMPT, affinity) is b


def test_a_new_incarnation_holds_nothing() -> None:
    affinity = PrefixAffinity()
    affinity.record(PROMPT, WorkerView("a", 1, 50))
    a, b = WorkerView("a", 3, 50), WorkerView("b", 2, 100)
    assert choose_worker([a, b], PROMPT, affinity) is b


def test_a_prefix_ends_where_the_tokens_differ() -> None:
    affinity = PrefixAffinity()
    affinity.record(PROMPT, WorkerView("a", 1, 50))
    assert affinity.longest(PROMPT) == (("a", 1), 3)
    assert affinity.longest([*PROMPT[:PAGE_TOKENS], *[999] * PAGE_TOKENS]) == (("a", 1), 1)
    assert affinity.longest([999, *PROMPT]) is None
    assert affinity.longest(PROMPT[: PAGE_TOKENS - 1]) is None


def test_memory_of_prefixes_is_bounded() -> None:
    affinity = PrefixAffinity(capacity=4)
    for first in range(10):
        affinity.record([first] * (2 * PAGE_TOKENS), WorkerView("a", 1, 50))
    assert affinity.longest([0] * PAGE_TOKENS) is None
    assert affinity.longest([9] * (2 * PAGE_TOKENS)) == (("a", 1), 2)


def test_pages_are_rounded_up() -> None:
    assert [pages_for(n) for n in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]


def test_what_was_refused_is_forgotten() -> None:
    affinity = PrefixAffinity()
    full, empty = WorkerView("full", 1, 31), WorkerView("empty", 2, 100)
    affinity.record(PROMPT, full)
    assert choose_worker([full, empty], PROMPT, affinity) is full
    affinity.forget(PROMPT, full)
    assert choose_worker([full, empty], PROMPT, affinity) is empty
