"""Trees in an executor: in steps of any size, beside sequences that share pages, ended at any moment."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.in_process import InProcess, LlmExecutor
from tests.model_factory import TinyModel, make_family_model, make_model
from tests.tiny_types import tiny_config
from tests.token_trees import Tree, random_tree
from workers.executors.engine import NoTrees
from workers.kv.page_pool import OutOfPages
from workers.operations import Accept, Chunk, Forward, Kind
from workers.outputs import GREEDY, DataType, OutputSpec, Sampling
from workers.token_trees import children_of, kept_path, path_to

VOCAB = 97
WITH_LOGITS = OutputSpec(logits=DataType.F32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), TinyModel())


@pytest.fixture
def executor(model: Path) -> InProcess:
    return LlmExecutor.load(model, kv_pages=64, self_check=False)


def row_of(executor: InProcess, sequence: int, token: int) -> torch.Tensor:
    """What follows one more token, which is taken back."""
    length = executor.engine.length(sequence)
    assert length is not None
    logits = executor.decode(sequence, token, WITH_LOGITS).logits
    executor.truncate_kv(sequence, length)
    assert logits is not None
    return torch.frombuffer(bytearray(logits), dtype=torch.float32)


def assert_holds(executor: InProcess, model: Path, sequence: int, tokens: list[int]) -> None:
    """A sequence has these tokens, and what follows it is what follows them where they are computed anew."""
    known = next(one for one in executor.engine.kv_table if one.key == sequence)
    assert list(known.token_ids) == tokens
    other = LlmExecutor.load(model, kv_pages=64, self_check=False)
    other.prefill(1, tokens)
    torch.testing.assert_close(row_of(executor, sequence, 7), row_of(other, 1, 7), rtol=1e-4, atol=1e-4)


def operation(executor: InProcess, sequence: int, tree: Tree) -> Forward:
    return Forward(
        op_id=1,
        sequence=sequence,
        position=executor.engine.length(sequence) or 0,
        token_ids=tree.token_ids,
        rows=len(tree.token_ids),
        accept=Accept.CHOSEN,
        kind=Kind.VERIFY,
        parents=tree.parents,
    )


def in_parts(executor: InProcess, op: Forward, dice: random.Random) -> Forward:
    """Runs a forward in steps of random sizes, from its begin on unless it has begun."""
    if not op.has_begun:
        executor.engine.begin(op)
    while op.remaining:
        part = dice.randint(1, op.remaining)
        executor.engine.execute([Chunk(op, op.computed, part)])
        executor.check_integrity()
    executor.engine.complete(op)
    return op


@pytest.mark.parametrize("seed", range(12))
def test_a_tree_in_steps_of_any_size(executor: InProcess, model: Path, seed: int) -> None:
    """Beside a fork that shares the last page, which stays as it is."""
    dice = random.Random(seed)
    text = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))]
    said = executor.prefill(1, text).token_id
    executor.fork(1, [2])
    plain = [said]
    for _ in range(6):
        plain.append(executor.decode(2, plain[-1]).token_id)
    executor.truncate_kv(2, len(text))

    def truth(path: Sequence[int]) -> int:
        return plain[len(path)] if list(path) == plain[: len(path)] and len(path) < len(plain) else 3

    tree = random_tree(dice, said, dice.randint(2, 64), VOCAB, truth)
    done = in_parts(executor, operation(executor, 1, tree), dice)
    kept = [tree.token_ids[index] for index in done.kept_path]
    assert kept == plain[: len(kept)] and done.kept == len(kept)
    assert done.outputs[done.kept_path[-1]].token_id == plain[len(kept)]
    assert_holds(executor, model, 1, text + kept)
    assert_holds(executor, model, 2, text)
    executor.release_cache(1)
    executor.release_cache(2)
    executor.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_that_ends_in_between_leaves_nothing(
    executor: InProcess, model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted between two of its steps, or with a step that fails; then the same tree is run again."""
    dice, engine = random.Random(seed), executor.engine
    text = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))]
    executor.prefill(1, text)
    tree = random_tree(dice, 5, 40, VOCAB)
    pages = executor.engine.kv_table.usage().pages_referenced
    op = operation(executor, 1, tree)
    engine.begin(op)
    engine.execute([Chunk(op, 0, dice.randint(1, 39))])
    if seed % 2:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "step", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.execute([Chunk(op, op.computed, op.remaining)])
    engine.roll_back(op)
    executor.check_integrity()
    assert executor.engine.kv_table.usage().pages_referenced == pages
    assert_holds(executor, model, 1, text)
    outputs, path = executor.verify_tree(1, tree.token_ids, tree.parents)
    assert_holds(executor, model, 1, text + [tree.token_ids[index] for index in path])
    assert len(outputs) == 40


def test_what_may_fail_comes_before_what_cannot_be_undone(
    executor: InProcess, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that cannot be moved fails the step, which may be run again."""
    said = executor.prefill(1, [1, 2, 3]).token_id
    executor.fork(1, [2])
    following = executor.decode(2, said).token_id
    tree = Tree([said, (following + 1) % VOCAB, following], [0, 0])
    op = operation(executor, 1, tree)
    executor.engine.begin(op)
    with monkeypatch.context() as patch:
        patch.setattr(executor.engine.kv, "move_slots", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.engine.execute([Chunk(op, 0, 3)])
    assert in_parts(executor, op, random.Random(0)).kept_path == [0, 2]
    assert_holds(executor, model, 1, [1, 2, 3, said, following])


def test_where_nothing_is_accepted_the_root_stays(executor: InProcess) -> None:
    """As of a repetition, which is computed on a copy."""
    said = executor.prefill(1, [1, 2, 3]).token_id
    executor.fork(1, [2])
    right = executor.decode(2, said).token_id
    op = dataclasses.replace(operation(executor, 1, Tree([said, right], [0])), accept=Accept.ALL)
    done = in_parts(executor, op, random.Random(0))
    assert (done.kept, done.kept_path) == (1, [0]) and len(done.outputs) == 2


def test_another_sequence_with_the_same_tokens_has_the_bits_that_it_has_alone(
    executor: InProcess, model: Path
) -> None:
    """It shares no KV of a tree, whose sums are rounded otherwise, nor what is computed from that."""
    text = [*range(40)]
    said = executor.prefill(1, text).token_id
    for _ in range(12):
        following = executor.decode(1, said).token_id
        executor.truncate_kv(1, len(text))
        _, path = executor.verify_tree(1, [said, (following + 1) % VOCAB, following], [0, 0])
        assert path == [0, 2]
        text += [said, following]
        said = executor.decode(1, 5).token_id
        text.append(5)
    other = LlmExecutor.load(model, kv_pages=64, self_check=False)
    expected = other.prefill(1, [*text, 7], WITH_LOGITS)
    assert executor.prefill(2, [*text, 7], WITH_LOGITS).logits == expected.logits
    executor.check_integrity()
    # What is behind the cut is as of any sequence again.
    reused = executor.engine.kv_table.usage().prefix_hit_tokens
    executor.truncate_kv(1, 40)
    executor.prefill(1, [*range(30)])
    executor.prefill(3, [*range(40), *range(30)])
    assert executor.engine.kv_table.usage().prefix_hit_tokens == reused + 64


def test_penalties_count_a_path_and_nothing_beside_it(executor: InProcess) -> None:
    spec = OutputSpec(sampling=Sampling(frequency_penalty=2.0, repetition_penalty=3.0), logprob=True)
    text, tree = [4, 5, 6], random_tree(random.Random(2), 9, 30, 8)
    executor.prefill(1, text)
    executor.fork(1, [2])
    outputs, _ = executor.verify_tree(1, tree.token_ids, tree.parents, spec)
    for index, output in enumerate(outputs):
        alone, _ = executor.forward_verify(2, tree.path(index), spec)
        executor.truncate_kv(2, 3)
        assert output.token_id == alone[-1].token_id
        assert output.logprob == pytest.approx(alone[-1].logprob, abs=1e-4)


def test_what_is_refused_leaves_nothing(executor: InProcess) -> None:
    executor.prefill(1, [1, 2, 3])
    before = executor.engine.kv_table.usage()
    executor.prefill(3, [1] * 500)
    executor.prefill(4, [2] * 460)
    with pytest.raises(OutOfPages):
        executor.verify_tree(1, [1] * 64, [0] * 63)
    executor.release_cache(3)
    executor.release_cache(4)
    assert executor.engine.kv_table.usage().tokens == before.tokens
    executor.check_integrity()


def test_a_model_that_attends_by_itself_takes_none_and_shares_no_forward(tmp_path: Path) -> None:
    settings = tiny_config("bloom").to_diff_dict()
    settings.pop("model_type", None)
    directory = make_family_model(tmp_path, "bloom", settings)
    executor = LlmExecutor.load(directory, dtype="float32", kv_pages=8, self_check=False)
    able = executor.capabilities()
    assert not able.supports_token_trees and not able.supports_native_unified_decode
    executor.prefill(1, [1, 2, 3])
    with pytest.raises(NoTrees):
        executor.verify_tree(1, [4, 5], [0])
    assert executor.engine.length(1) == 3
    assert executor.forward_verify(1, [4, 5], GREEDY)[1] == 1


def test_paths() -> None:
    tokens, parents = [9, 1, 1, 2, 3, 2], [0, 0, 1, 2, 2]
    assert children_of(parents) == [[1, 2], [3], [4, 5], [], [], []]
    assert path_to(parents, 5) == [0, 2, 5] and path_to(parents, 0) == [0]
    # Of equal siblings the first counts, whatever is behind the second.
    assert kept_path(tokens, parents, [1, 2, 3, 0, 0, 0]) == [0, 1, 3]
    assert kept_path(tokens, parents, [1, 3, 3, 0, 0, 0]) == [0, 1]
    assert kept_path(tokens, parents, [7, 2, 3, 0, 0, 0]) == [0]
