"""Recurrent states on disk, beside the pages: a text goes on from the last snapshot, with the same bits."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commands import Truncate
from tests.damaged_pages import FAULTS, Fault, files_in, flip, tear
from tests.families import settings_of
from tests.model_factory import load_decoder, make_family_model
from tests.mtp_heads import make_mtp_model
from tests.recurrent import RECURRENT
from tests.tiny_types import tiny_model
from tests.workers.disk_worker import PAGE, DiskWorker, random_trial, text
from tests.workers.packing import poison
from tests.workers.stepping import unhurried
from tests.workers.test_kv_disk import ignore_checksums, ignore_digest
from workers.common.draft_models import MTP_HEAD
from workers.executors.engine import Engine
from workers.executors.llm import LlmExecutor
from workers.executors.memory import new_table
from workers.head_drafting import HeadDrafting
from workers.kv.state_tensors import StateTensors
from workers.kv.tensors import KvTensors
from workers.models.library.loading import make_library_model
from workers.models.model import Model
from workers.operations import Forward, Kind
from workers.runners.eager import EagerRunner

VOCAB, SPACING, SLOTS = 97, 2 * PAGE, 12
MODELS = ("qwen3_next", "granite hybrid", "lfm2")


@functools.cache
def model_of(name: str) -> Model:
    if name in RECURRENT and name not in MODELS:
        return make_library_model(tiny_model(name, **RECURRENT[name]))
    with tempfile.TemporaryDirectory() as directory:
        return load_decoder(make_family_model(Path(directory), *settings_of(name)), pack=True)


def worker_of(name: str, directory: Path | None, pages: int = 20) -> DiskWorker:
    """Its memory has any contents, as that of a new process."""
    model = model_of(name)
    kv = KvTensors(
        model.kv_layers,
        num_pages=pages,
        page_size=PAGE,
        dtype=model.dtype,
        pack=model.packs_kv,
        states=StateTensors(model.state_shapes, SLOTS, SPACING),
    )
    poison(kv)
    return DiskWorker(directory, engine=Engine(new_table(kv), kv, EagerRunner(model, kv), takes_trees=False))


@functools.cache
def undisturbed_of(name: str, tokens: tuple[int, ...]) -> bytes:
    return worker_of(name, None).append(1, list(tokens))


def undisturbed(name: str, tokens: list[int]) -> bytes:
    return undisturbed_of(name, tuple(tokens))


def states_in(directory: Path) -> list[Path]:
    return [path for path in files_in(directory) if len(path.name) == 66]


@pytest.mark.parametrize("name", MODELS)
def test_another_process_goes_on_from_the_last_snapshot(name: str, tmp_path: Path) -> None:
    """A prompt of 7 pages grows by decodes to 9. With a snapshot every two, the last is at the 8th."""
    first, tokens = worker_of(name, tmp_path), text(1, 7 * PAGE + 3, VOCAB)
    first.append(1, tokens)
    while len(tokens) < 9 * PAGE:
        first.answers(Forward(1000 + len(tokens), 1, len(tokens), [5], kind=Kind.DECODE))
        tokens.append(5)
    first.store()
    assert len(states_in(tmp_path)) == 4 and len(files_in(tmp_path)) == 8 + 4
    second = worker_of(name, tmp_path)
    assert second.append(7, [*tokens, 6]) == undisturbed(name, [*tokens, 6])
    assert second.computed == [PAGE + 1]
    assert second.disk is not None
    # Eight pages and the last state of the four.
    assert second.disk.usage().read_pages == second.disk.usage().wanted_pages == 9
    # Without the disk all tokens are computed.
    assert worker_of(name, None).append(7, [*tokens, 6]) == undisturbed(name, [*tokens, 6])


def test_what_is_of_no_use_without_a_snapshot_is_neither_stored_nor_read(tmp_path: Path) -> None:
    worker, tokens = worker_of("lfm2", tmp_path), text(1, 5 * PAGE + 1, VOCAB)
    worker.append(1, tokens[: 2 * PAGE - 1])
    worker.store()
    assert not files_in(tmp_path)
    worker.append(1, tokens[2 * PAGE - 1 :], 2 * PAGE - 1)
    worker.store()
    assert len(files_in(tmp_path)) == 4 + 2
    for path in states_in(tmp_path):
        path.unlink()
    other = worker_of("lfm2", tmp_path)
    assert other.append(1, tokens) == undisturbed("lfm2", tokens)
    assert other.disk is not None and other.disk.usage().read_pages == 0
    # They are stored again when they are computed again.
    other.store()
    assert len(states_in(tmp_path)) == 2


def test_a_state_that_others_have_taken_the_place_of_is_read_to_its_pages(tmp_path: Path) -> None:
    """There are fewer slots than callers: their states give way before their pages do."""
    worker, tokens = worker_of("lfm2", tmp_path, pages=60), text(1, 4 * PAGE + 1, VOCAB)
    worker.append(1, tokens)
    worker.store()
    for number in range(2, 14):
        worker.append(number, text(number, 9, VOCAB))
    worker.answers(Truncate(999, 1, 4 * PAGE))
    worker.engine.release(1)
    assert worker.append(1, tokens) == undisturbed("lfm2", tokens)
    assert worker.computed[-1] == 1
    assert worker.disk is not None and worker.disk.usage().read_pages == 1


def test_a_model_whose_pages_hold_nothing_goes_on_from_its_state(tmp_path: Path) -> None:
    """All layers are recurrent, and run by the library's code, whose bits depend on where a chunk begins."""
    tokens = text(1, 5 * PAGE, VOCAB)
    first = worker_of("mamba", tmp_path)
    first.append(1, tokens)
    first.store()
    second = worker_of("mamba", tmp_path)
    found, exact = (
        np.frombuffer(row, "<f4") for row in (second.append(7, tokens), undisturbed("mamba", tokens))
    )
    assert second.computed == [PAGE]
    assert np.abs(found - exact).max() < 1e-4 * np.abs(exact).max()


def trial(name: str, directory: Path, seed: int, faults: Sequence[Fault] = FAULTS) -> None:
    random_trial(
        lambda: worker_of(name, directory, pages=12),
        directory,
        seed,
        lambda tokens: undisturbed(name, tokens),
        faults,
        VOCAB,
    )


@settings(max_examples=settings().max_examples // 10)
@given(st.sampled_from(MODELS), st.integers(0, 1 << 32))
def test_no_fault_of_a_file_changes_an_answer(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    trial(name, tmp_path_factory.mktemp("kv"), seed)


def only_states(fault: Fault) -> Fault:
    """The fault, of files of states; nothing happens to others."""

    def hit(path: Path, rng: random.Random) -> None:
        if len(path.name) == 66:
            fault(path, rng)

    return hit


def swap_states(path: Path, rng: random.Random) -> None:
    other = rng.choice(states_in(path.parents[1]))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


# With the faults that are dangerous then.
PLANTED = (
    (ignore_digest, [only_states(swap_states)]),
    (ignore_checksums, [only_states(tear), only_states(flip)]),
)


@pytest.mark.parametrize(("plant", "faults"), PLANTED)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    faults: Sequence[Fault],
) -> None:
    def trials() -> None:
        for seed in range(40):
            trial("lfm2", tmp_path_factory.mktemp("kv"), seed, faults)

    plant(monkeypatch)
    with pytest.raises(AssertionError):
        trials()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite", "qwen3_next"])
def test_the_hidden_row_that_a_head_goes_on_from_is_stored_too(name: str, tmp_path: Path) -> None:
    """Drafts are those of a worker that has computed everything. Of a model without recurrent layers, too."""
    model = make_mtp_model(tmp_path / "model", name)
    (drafts, _), again = drafts_of(model, tmp_path / "kv"), drafts_of(model, tmp_path / "kv")
    assert again == (drafts, 1)


def drafts_of(model: Path, directory: Path) -> tuple[list[int], int]:
    """What a new worker drafts behind a text, and how many tokens of it the worker has computed."""
    executor = LlmExecutor.load(model, kv_pages=40, self_check=False, draft=Path(MTP_HEAD))
    drafting, states = executor.drafting, executor.engine.kv_table.states
    assert isinstance(drafting, HeadDrafting) and states is not None
    unhurried(drafting)
    worker = DiskWorker(directory, engine=executor.engine, drafting=drafting)
    # The last token is computed from what is stored of those before it.
    tokens = text(3, 2 * states.spacing + 1, VOCAB)
    answer = worker.done(Forward(1, 1, 0, tokens, draft_tokens=5))
    assert len(answer.drafts) == 5
    worker.store()
    return list(answer.drafts), len(tokens) - answer.reused
