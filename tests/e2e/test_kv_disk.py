"""KV on disk survives all processes: what was computed before a crash of everything is read, not computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from service.model_names import SHIPPED_MODEL
from tests import undisturbed
from tests.damaged_pages import files_in
from tests.e2e.test_adoption import TOP, Home, home, top_logprobs_after
from tests.families import settings_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import make_family_model
from workers.outputs import OutputSpec

__all__ = ["home"]

PAGE = 16
# Of the shipped model's vocabulary; six full pages each.
TEXTS = [[(7 * i + i * i * step) % 11 for i in range(1, 101)] for step in (1, 3)]
# Of tiny qwen3_next: as many tokens as take the memory of a state.
SPACING = 96


def test_kv_comes_back_after_a_crash_of_the_gateway_and_all_workers(home: Home, tmp_path: Path) -> None:
    flags = ("--kv-disk", str(tmp_path), "--kv-disk-gb", "0.1")
    caches = computed_and_killed(home, flags, SHIPPED_MODEL, TEXTS, 12)
    # The machine went down with the others: one page was not written to its end.
    torn = max(files_in(tmp_path), key=os.path.getsize)
    os.truncate(torn, torn.stat().st_size // 2)
    with home.start(*flags, model=SHIPPED_MODEL) as second:
        home.note_workers(second)
        replayed = 0
        for text, cache in zip(TEXTS, caches, strict=True):
            answer = second.decode(cache, 7, position=len(text), output=TOP)
            replayed += answer.replayed_tokens
            assert list(answer.output.top.logprobs) == top_logprobs_after([*text, 7])
        # The rest was read.
        wait_for_computed(second, replayed + len(TEXTS))
        used = [worker.kv_disk for worker in second.status().workers]
        assert (read_pages(second), sum(one.refused_pages for one in used)) == (11, 1)
        # Of the text with the torn page all that comes after the page before it.
        whole = len(TEXTS[0]) + 1
        among = [(whole - 6 * PAGE) + (whole - before * PAGE) for before in range(6)]
        assert computed_tokens(second) in among
        assert all(not one.stopped and 0 < one.bytes <= one.max_bytes == 10**8 for one in used)
        for cache in caches:
            second.release(cache)
        second.assert_pools_are_whole()


def test_a_text_of_a_hybrid_goes_on_from_its_last_snapshot(home: Home, tmp_path: Path) -> None:
    """And from its beginning if each state on disk is that of another text, or of another place of it."""
    model = str(make_family_model(tmp_path / "model", *settings_of("qwen3_next")))
    texts = [[(7 * i + i * i * step) % 97 for i in range(1, 251)] for step in (1, 3)]
    pages, states = 2 * (2 * SPACING // PAGE), 2 * 2
    flags = ("--kv-disk", str(tmp_path / "kv"))
    caches = computed_and_killed(home, flags, model, texts, pages + states)
    with home.start(*flags, model=model) as second:
        home.note_workers(second)
        decode_all(second, model, caches, texts, 7)
        # Of the states of a text only the last one is read.
        assert read_pages(second) == pages + 2
        assert computed_tokens(second) == 2 * (len(texts[0]) - 2 * SPACING)
        kill_all(home, second)
    files = [path for path in files_in(tmp_path / "kv") if len(path.name) == 66]
    assert len(files) == states
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    with home.start(*flags, model=model) as third:
        home.note_workers(third)
        decode_all(third, model, caches, texts, 8)
        assert sum(worker.kv_disk.refused_pages for worker in third.status().workers) == 2
        assert computed_tokens(third) == 2 * len(texts[0])
        for cache in caches:
            third.release(cache)
        third.assert_pools_are_whole()


def computed_and_killed(
    home: Home, flags: Sequence[str], model: str, texts: Sequence[list[int]], files: int
) -> list[str]:
    """The caches of these texts, which are lost in memory, when there are so many files."""
    with home.start(*flags, model=model) as first:
        home.note_workers(first)
        answers = [first.prefill(text) for text in texts]
        first.wait_until(
            lambda: sum(worker.kv_disk.written_pages for worker in first.status().workers) >= files
        )
        kill_all(home, first)
    return [answer.kv_cache.cache_id for answer in answers]


def kill_all(home: Home, gateway: GatewayProcess) -> None:
    gateway.kill()
    while home.workers:
        worker = home.workers.pop()
        worker.kill()
        worker.wait()


def decode_all(
    gateway: GatewayProcess, model: str, caches: Sequence[str], texts: Sequence[list[int]], token: int
) -> None:
    """Appends a token to each. What comes next is as if nothing had been lost."""
    spec = OutputSpec(top_logprobs=3)
    for text, cache in zip(texts, caches, strict=True):
        before = computed_tokens(gateway)
        answer = gateway.decode(cache, token, position=len(text), output=TOP)
        # The rest was read.
        wait_for_computed(gateway, before + answer.replayed_tokens + 1)
        text.append(token)
        (undisturbed_row,) = undisturbed.outputs(text, [], spec, model=model)
        assert list(answer.output.top.logprobs) == list(undisturbed_row.top_logprobs)


def read_pages(gateway: GatewayProcess) -> int:
    return sum(worker.kv_disk.read_pages for worker in gateway.status().workers)


def wait_for_computed(gateway: GatewayProcess, tokens: int) -> None:
    """Until so many tokens were computed: a busy worker tells its counts later."""
    gateway.wait_until(lambda: computed_tokens(gateway) == tokens)


def computed_tokens(gateway: GatewayProcess) -> int:
    return sum(worker.counts.step_tokens for worker in gateway.status().workers)
