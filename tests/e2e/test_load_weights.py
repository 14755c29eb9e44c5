"""Another model while the gateway runs: served once it has proved itself; until then nothing has changed."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
import pytest
from google.protobuf import duration_pb2
from quire.v1 import executor_pb2 as pb
from quire.v1 import runner_pb2

from tests.error_details import reason_of, refused
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, hf_greedy, make_model

# Far more than anything takes.
PATIENCE_S = 60
PROMPT = [3, 1, 4, 1, 5]
STEPS = 12
FLAGS = ["--dtype", "float32", "--kv-pages", "64"]


class Model:
    """A small random model, and what it says after the prompt."""

    def __init__(self, directory: Path, vocab_size: int, seed: int) -> None:
        self.directory = make_model(directory, TinyModel(vocab_size=vocab_size, seed=seed))
        self.tokens = hf_greedy(self.directory, PROMPT, STEPS)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("first"), 97, 0)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Knows fewer tokens."""
    return Model(tmp_path_factory.mktemp("second"), 61, 1)


def serve(model: Model, home: Path | None = None, *flags: str, grace_s: str = "0") -> GatewayProcess:
    place = [] if home is None else ["--data-dir", str(home), "--orphan-grace-s", grace_s]
    return GatewayProcess(model=str(model.directory), workers=1, flags=[*FLAGS, *place, *flags])


def load(gateway: GatewayProcess, source: Path | str, drain_s: int | None = None) -> Any:
    drain = None if drain_s is None else duration_pb2.Duration(seconds=drain_s)
    request = runner_pb2.LoadWeightsRequest(source=str(source), drain=drain)
    return gateway.runner.LoadWeights(request, timeout=PATIENCE_S)


def prefill(gateway: GatewayProcess, request_id: str = "") -> pb.PrefillResponse:
    request = pb.PrefillRequest(token_ids=PROMPT, request_id=request_id)
    return gateway.stub.Prefill(request, timeout=PATIENCE_S)


def decode(gateway: GatewayProcess, cache_id: str, token_id: int) -> pb.DecodeResponse:
    return gateway.stub.Decode(pb.DecodeRequest(cache_id=cache_id, token_id=token_id), timeout=PATIENCE_S)


def served(gateway: GatewayProcess) -> str:
    """What describes the model that is served agrees with what is served. Its name."""
    model = gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_S).model
    runtime = gateway.runner.GetRuntime(runner_pb2.GetRuntimeRequest(), timeout=PATIENCE_S)
    assert (runtime.runtime.fingerprint, runtime.runtime.model_id) == (model.fingerprint, model.model_id)
    return model.model_id


def pids(gateway: GatewayProcess) -> set[int]:
    return {worker.pid for worker in gateway.status().workers}


class Callers:
    """Threads that generate with caches, and know both models."""

    def __init__(self, gateway: GatewayProcess, models: list[Model], threads: int = 2) -> None:
        self._gateway = gateway
        self._continuations = {tuple(model.tokens): index for index, model in enumerate(models)}
        self.stopping = threading.Event()
        # What became of the generations: whose tokens they were, or why they ended.
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"
        assert self.wrong == []

    def count(self, what: str) -> Callable[[], bool]:
        """Whether it was seen since."""
        before = self.seen[what]
        return lambda: self.seen[what] > before + 1 or bool(self.wrong)

    def _run(self) -> None:
        # Not all the time: others have to load.
        while not self.stopping.wait(0.02):
            chosen: list[int] = []
            try:
                answer = prefill(self._gateway)
                chosen.append(answer.output.token_id)
                while len(chosen) < STEPS:
                    went_on = decode(self._gateway, answer.kv_cache.cache_id, chosen[-1])
                    chosen.append(went_on.output.token_id)
                release = pb.ReleaseCacheRequest(cache_id=answer.kv_cache.cache_id)
                assert self._gateway.stub.ReleaseCache(release, timeout=PATIENCE_S).released
            except grpc.RpcError as error:
                self.seen[reason_of(error)] += 1
            else:
                self.seen[f"model {self._continuations.get(tuple(chosen))}"] += 1
            if not any(list(whole[: len(chosen)]) == chosen for whole in self._continuations):
                self.wrong.append(f"{chosen} is of no model, or of two")


def test_what_cannot_be_served_changes_nothing(first: Model, second: Model, tmp_path: Path) -> None:
    """Nothing there; no model; two at once; a caller who goes. Nor does a new process."""
    (tmp_path / "config.json").write_text("{}")
    with serve(first) as gateway, Callers(gateway, [first]) as callers:
        workers = pids(gateway)
        old = prefill(gateway)
        assert refused(lambda: list(load(gateway, tmp_path / "none"))) == "BAD_SOURCE"
        with pytest.raises(grpc.RpcError) as failed:
            list(load(gateway, tmp_path))
        assert reason_of(failed.value) == "LOAD_FAILED"
        said = str(failed.value.details())
        assert "config.json: model_type: must be the name of a model family, got None" in said
        assert str(tmp_path) not in said
        loading = load(gateway, second.directory)
        gateway.wait_until(lambda: len(gateway.status().workers) == 2 and all(loaders(gateway, workers)))
        assert refused(lambda: list(load(gateway, second.directory))) == "LOADING"
        processes = [psutil.Process(pid) for pid in loaders(gateway, workers)]
        loading.cancel()
        assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1], "nobody is left of what was loaded"
        gateway.wait_until(lambda: len(gateway.status().workers) == 1)
        assert decode(gateway, old.kv_cache.cache_id, first.tokens[0]).output.token_id == first.tokens[1]
        assert pids(gateway) == workers
        assert served(gateway) == first.directory.name
        rebuild = runner_pb2.RebuildSessionRequest(cause=runner_pb2.REBUILD_CAUSE_CUDA_CONTEXT_POISONED)
        assert gateway.runner.RebuildSession(rebuild, timeout=PATIENCE_S).rebuilt == 1
        assert not pids(gateway) & workers
        went_on = decode(gateway, old.kv_cache.cache_id, first.tokens[1])
        assert went_on.output.token_id == first.tokens[2]
        gateway.wait_until(callers.count("model 0"))
    assert set(callers.seen) == {"model 0"}


def loaders(gateway: GatewayProcess, known: set[int]) -> list[int]:
    return [worker.pid for worker in gateway.status().workers if worker.pid not in known]


def test_a_switch_under_load(first: Model, second: Model) -> None:
    """At once; then back, with time for who has caches; a worker of theirs dies meanwhile."""
    with serve(first) as gateway, Callers(gateway, [first, second]) as callers:
        old = prefill(gateway, "one")
        forked = gateway.stub.ForkCache(pb.ForkCacheRequest(cache_id=old.kv_cache.cache_id, count=1))
        gateway.wait_until(callers.count("model 0"))
        said = list(load(gateway, second.directory))
        assert [s.phase for s in said][-1] == runner_pb2.LOAD_WEIGHTS_PHASE_SERVING
        assert said[-1].model_id == served(gateway) == second.directory.name
        gateway.wait_until(callers.count("model 1"))
        for cache in (old.kv_cache, *forked.kv_caches):
            # The token is of the vocabulary of neither.
            assert refused(lambda: decode(gateway, cache.cache_id, 500)) == "WEIGHTS_CHANGED"  # noqa: B023
            renew = pb.RenewCacheRequest(cache_id=cache.cache_id)
            assert refused(lambda: gateway.stub.RenewCache(renew)) == "WEIGHTS_CHANGED"  # noqa: B023
        assert refused(lambda: prefill(gateway, "one")) == "WEIGHTS_CHANGED"
        release = pb.ReleaseCacheRequest(cache_id=old.kv_cache.cache_id)
        assert gateway.stub.ReleaseCache(release).released
        assert refused(lambda: decode(gateway, old.kv_cache.cache_id, 1)) == "CACHE_NOT_FOUND"

        old, workers = prefill(gateway, "two"), pids(gateway)
        loading = load(gateway, first.directory, drain_s=600)
        while next(loading).phase != runner_pb2.LOAD_WEIGHTS_PHASE_DRAINING:
            pass
        assert served(gateway) == first.directory.name
        gateway.wait_until(callers.count("model 0"))
        (old_worker,) = workers & pids(gateway)
        os.kill(old_worker, signal.SIGKILL)
        # The one that was asked for, although the weights that are served now have another vocabulary.
        again = prefill(gateway, "two")
        assert (again.kv_cache.cache_id, again.output.token_id) == (
            old.kv_cache.cache_id,
            old.output.token_id,
        )
        chosen = [old.output.token_id]
        while len(chosen) < STEPS:
            chosen.append(decode(gateway, old.kv_cache.cache_id, chosen[-1]).output.token_id)
        assert chosen == second.tokens
        # The token is of the vocabulary of the model that is served, and not of the cache's.
        assert refused(lambda: decode(gateway, old.kv_cache.cache_id, 80)) == "TOKEN_OUT_OF_VOCAB"
        loading.cancel()
        gateway.wait_until(callers.count("model 0"))
        assert refused(lambda: list(load(gateway, second.directory))) == "LOADING"
    assert set(callers.seen) <= {"model 0", "model 1", "WEIGHTS_CHANGED"}
    assert callers.seen["WEIGHTS_CHANGED"] <= 2 * 2


def test_a_gateway_that_is_killed_is_followed_by_one_that_knows(
    first: Model, second: Model, home: Path
) -> None:
    """Killed while weights are loaded, while those before are drained, and later."""
    everybody: list[psutil.Process] = []
    with serve(first, home, grace_s="60") as gateway:
        cache = prefill(gateway).kv_cache.cache_id
        before = pids(gateway)
        loading = load(gateway, second.directory)
        gateway.wait_until(lambda: len(pids(gateway)) == 2 and 0 not in pids(gateway))
        everybody += [psutil.Process(pid) for pid in pids(gateway)]
        gateway.kill()
        assert loading.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
    with serve(first, home, grace_s="60") as gateway:
        assert pids(gateway) == before, "whoever served is adopted"
        went_on = decode(gateway, cache, first.tokens[0])
        assert went_on.output.token_id == first.tokens[1] and went_on.replayed_tokens == 0
        loading = load(gateway, second.directory, drain_s=600)
        while next(loading).phase != runner_pb2.LOAD_WEIGHTS_PHASE_DRAINING:
            pass
        new = prefill(gateway)
        assert decode(gateway, cache, first.tokens[1]).output.token_id == first.tokens[2]
        everybody += [psutil.Process(pid) for pid in pids(gateway)]
        after = pids(gateway) - before
        gateway.kill()
    with serve(first, home, grace_s="60") as gateway:
        # With the old settings: what was loaded since is served on, and the drain is over.
        assert pids(gateway) == after and served(gateway) == second.directory.name
        went_on = decode(gateway, new.kv_cache.cache_id, second.tokens[0])
        assert went_on.output.token_id == second.tokens[1] and went_on.replayed_tokens == 0
        assert refused(lambda: decode(gateway, cache, first.tokens[2])) == "WEIGHTS_CHANGED"
    assert not psutil.wait_procs(everybody, timeout=PATIENCE_S)[1]
