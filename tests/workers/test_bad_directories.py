"""A directory that is no sound model is refused in one line, without much memory and without waiting."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.bad_directories import BAD_DIRECTORIES, TOKENIZER, BadDirectory, make_good, setting, sparse
from workers.executors.llm import LlmExecutor
from workers.kv.sizing import KvSizingError
from workers.models.errors import ModelError

# With what a worker takes before it loads anything, less than a gigabyte.
MAX_BYTES = 640 << 20
# A load that waits for something ends here. Nothing takes nearly as long.
HANGS_AFTER_S = 60


class Hangs(BaseException):
    """A load waits. Of a kind that nothing takes for an error of reading."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models that can be served: not sharded, and sharded."""
    made = tmp_path_factory.mktemp("good")
    return {sharded: make_good(made / str(sharded), sharded=sharded) for sharded in (False, True)}


@contextmanager
def bounded() -> Iterator[None]:
    """Within, little memory can be had beyond what is there, and nothing waits for ever."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Hangs

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANGS_AFTER_S)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("bad", BAD_DIRECTORIES, ids=lambda bad: bad.name)
def test_a_bad_directory_is_refused_by_name(
    tmp_path: Path, good: dict[bool, Path], bad: BadDirectory
) -> None:
    directory = shutil.copytree(good[bad.sharded], tmp_path / "model")
    bad.damage(directory)
    with bounded(), pytest.raises((ModelError, KvSizingError), match=bad.says) as refused:
        LlmExecutor.load(directory, kv_pages=4)
    said = str(refused.value)
    assert str(directory) in said
    assert said.isprintable() and len(said) < 1000


@pytest.mark.parametrize("sharded", [False, True])
def test_a_good_directory_loads(good: dict[bool, Path], sharded: bool) -> None:
    with bounded():
        executor = LlmExecutor.load(good[sharded], kv_pages=4)
        executor.warmup()
    assert executor.text.tokenizer_json == (good[sharded] / TOKENIZER).read_bytes()


def test_links_to_files_elsewhere_are_followed(tmp_path: Path, good: dict[bool, Path]) -> None:
    """As caches of downloaded models have them."""
    for file in good[False].iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert LlmExecutor.load(tmp_path, kv_pages=4).text.tokenizer_json


def test_a_long_context_takes_no_more_than_the_pool(tmp_path: Path, good: dict[bool, Path]) -> None:
    directory = shutil.copytree(good[False], tmp_path / "model")
    setting(max_position_embeddings=1 << 24)(directory)
    with bounded():
        executor = LlmExecutor.load(directory, kv_pages=4)
        executor.warmup()
    assert executor.info().max_seq_len == 1 << 24
    assert executor.capabilities().kv_capacity_tokens == 64


@pytest.mark.parametrize(("size", "most"), [(100 << 20, 1 << 40), (1 << 40, 1 << 40), (1001, 1000)])
def test_a_tokenizer_too_large_to_be_handed_out_is_left_out(
    tmp_path: Path, good: dict[bool, Path], caplog: pytest.LogCaptureFixture, size: int, most: int
) -> None:
    directory = shutil.copytree(good[False], tmp_path / "model")
    sparse(TOKENIZER, size)(directory)
    with bounded():
        assert LlmExecutor.load(directory, kv_pages=4, max_text_bytes=most).text.tokenizer_json == b""
    assert "too large to be sent to clients" in caplog.text
