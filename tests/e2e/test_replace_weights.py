"""Weights replaced in place: no token of other weights than the answer says, whatever happens."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire.v1 import admin_pb2
from quire.v1 import executor_pb2 as pb
from safetensors.torch import load_file, save_file

from tests.adapter_factory import make_adapter, merge
from tests.e2e.greedy import Text, assert_serves
from tests.e2e.test_adapters import load, unload
from tests.error_details import reason_of, refused
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy

PATIENCE_S = 60
STEPS = 8
RECOMPUTE = admin_pb2.PREVIOUS_CACHES_RECOMPUTE


def serve(model: Path, *flags: str, workers: int = 1) -> GatewayProcess:
    flags = ("--dtype", "float32", "--kv-pages", "128", *flags)
    return GatewayProcess(model=str(model), workers=workers, flags=[*flags])


def replace(gateway: GatewayProcess, source: Path, previous_caches: Any = RECOMPUTE) -> str:
    """Returns the fingerprint of what is served afterwards."""
    request = admin_pb2.LoadWeightsRequest(source=str(source), previous_caches=previous_caches)
    *_, last = gateway.admin.LoadWeights(request, timeout=PATIENCE_S)
    assert last.phase == admin_pb2.LOAD_WEIGHTS_PHASE_SERVING
    return last.fingerprint


@pytest.fixture(scope="module")
def server(models: list[Path]) -> Iterator[GatewayProcess]:
    with serve(models[0]) as gateway:
        yield gateway


@pytest.fixture
def gateway(server: GatewayProcess, models: list[Path]) -> Iterator[GatewayProcess]:
    """One for all tests, with the first weights. A test leaves no caches behind."""
    replace(server, models[0])
    yield server
    server.assert_pools_are_whole()


def test_caches_continue_with_the_new_weights(gateway: GatewayProcess, models: list[Path]) -> None:
    """What was said stays, and what follows is what the new weights say to it."""
    pid = gateway.status().workers[0].pid
    text, other = Text(gateway), Text(gateway)
    text.decode(3)
    said = list(text.tokens)
    first = text.weights
    fingerprint = replace(gateway, models[1])
    assert gateway.model().fingerprint == fingerprint and gateway.model().model_id == "1"
    text.decode(STEPS)
    assert text.weights == first + 1
    begun = [*text.prompt, *said]
    # The last token that was said was chosen by the old weights; it is appended now.
    assert text.tokens == [*said, *hf_greedy(models[1], begun, STEPS)]
    assert_serves(gateway, models[1])
    replace(gateway, models[0])
    other.decode(STEPS)
    assert other.tokens[1:] == hf_greedy(models[0], [*other.prompt, other.tokens[0]], STEPS)
    assert gateway.status().workers[0].pid == pid
    for each in (text, other):
        each.release()


def test_caches_end_if_the_caller_says_so(gateway: GatewayProcess, models: list[Path]) -> None:
    text = Text(gateway)
    other = gateway.prefill(text.prompt, request_id="one").kv_cache.cache_id
    replace(gateway, models[1], admin_pb2.PREVIOUS_CACHES_UNSPECIFIED)
    assert refused(lambda: text.decode(1)) == "WEIGHTS_CHANGED"
    assert refused(lambda: gateway.prefill(text.prompt, request_id="one")) == "WEIGHTS_CHANGED"
    renew = pb.RenewCacheRequest(cache_id=other)
    assert refused(lambda: gateway.stub.RenewCache(renew, timeout=PATIENCE_S)) == "WEIGHTS_CHANGED"
    assert gateway.release(other)
    text.release()
    assert_serves(gateway, models[1])


def test_what_cannot_be_served_changes_nothing(
    gateway: GatewayProcess, models: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models[1], broken)
    (file,) = broken.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    overflowing = tmp_path / "overflowing"
    shutil.copytree(models[1], overflowing)
    weights = load_file(overflowing / file.name)
    large = {name: weights[name] * 1e30 for name in ("model.norm.weight", "lm_head.weight")}
    save_file({**weights, **large}, overflowing / file.name)
    text = Text(gateway)
    before = gateway.model()
    for directory, why in (
        (broken, "model.safetensors: tensor "),
        (models[3], "the config differs from that of the weights that are served: head_dim, "),
        # Every call would fail, with WORKER_FAULT.
        (overflowing, "its logits are not finite"),
    ):
        with pytest.raises(grpc.RpcError) as failed:
            replace(gateway, directory)
        assert reason_of(failed.value) == "LOAD_FAILED"
        said = str(failed.value.details())
        assert f"the weights cannot be used: {why}" in said and str(directory) not in said
    assert refused(lambda: replace(gateway, tmp_path / "nothing")) == "BAD_SOURCE"
    assert refused(lambda: replace(gateway, models[1], 99)) == "BAD_PREVIOUS_CACHES"
    assert gateway.model() == before
    assert text.finish() == hf_greedy(models[0], text.prompt, len(text.tokens))
    replace(gateway, models[1])
    text.release()


def renamed_dtype(source: Path, directory: Path, dtype: str) -> Path:
    """A copy whose config names another dtype of the weights, as that of a trainer in another dtype does."""
    shutil.copytree(source, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": dtype}))
    return directory


def test_the_dtype_of_files_is_that_of_the_trainer(
    gateway: GatewayProcess, models: list[Path], tmp_path: Path
) -> None:
    """It does not matter if the server is told a dtype. Else the next worker would take the files'."""
    other = renamed_dtype(models[1], tmp_path / "other", "bfloat16")
    replace(gateway, other)
    assert_serves(gateway, models[1])
    replace(gateway, models[0])
    differs = r"the config differs from that of the weights that are served: dtype;"
    with GatewayProcess(model=str(models[0])) as automatic, pytest.raises(grpc.RpcError, match=differs):
        replace(automatic, other)


def test_adapters_stay_in_place(gateway: GatewayProcess, models: list[Path], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", models[0], 1)
    merged = merge(tmp_path / "merged", models[1], adapter)
    load(gateway, "a", adapter)
    text = Text(gateway, "a")
    replace(gateway, models[1])
    text.decode(STEPS)
    assert text.tokens[1:] == hf_greedy(merged, [*text.prompt, text.tokens[0]], STEPS)
    text.release()
    unload(gateway, "a")


def test_loads_are_answered_while_weights_are_replaced(
    gateway: GatewayProcess, models: list[Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", models[0], 1)
    ended = threading.Event()
    errors: list[grpc.RpcError] = []

    def load_again_and_again() -> None:
        try:
            while not ended.is_set():
                load(gateway, "a", adapter)
        except grpc.RpcError as error:
            errors.append(error)

    loading = threading.Thread(target=load_again_and_again)
    loading.start()
    for turn in range(10):
        replace(gateway, models[turn % 2])
    ended.set()
    loading.join()
    assert not errors
    unload(gateway, "a")


def test_callers_under_way_do_not_notice(models: list[Path]) -> None:
    """Decodes of many callers while weights are replaced: none fails, each token fits its weights."""
    with serve(models[0], workers=2) as gateway:
        texts = [Text(gateway) for _ in range(4)]
        steps: list[tuple[int, list[int], int]] = []
        for turn in range(1, 4):
            calls = []
            for index, text in enumerate(texts):
                request = pb.DecodeRequest(cache_id=text.cache_id, token_id=text.tokens[-1])
                calls.append((index, text, gateway.stub.Decode.future(request, timeout=PATIENCE_S)))
            replace(gateway, models[turn % 3])
            for index, text, call in calls:
                answer = call.result()
                begun = [*text.prompt, *text.tokens]
                text.tokens.append(answer.output.token_id)
                steps.append((index, begun, answer.kv_cache.weights_version))
        for index, begun, weights in steps:
            said = texts[index].tokens[len(begun) - len(texts[index].prompt)]
            assert [said] == hf_greedy(models[weights % 3], begun, 1)
        with pytest.raises(grpc.RpcError):
            replace(gateway, models[3])


def test_workers_with_weights_that_a_restore_has_undone_are_not_adopted(
    models: list[Path], home: Path, tmp_path: Path
) -> None:
    """They have the same name and were started for the same directory as those that are wanted."""
    flags = ("--data-dir", str(home), "--orphan-grace-s", "60")
    with serve(models[0], *flags) as gateway:
        text = Text(gateway)
        (worker,) = gateway.status().workers
        first = gateway.model()
        gateway.kill()
        copy = shutil.copytree(home, tmp_path / "copy", ignore=shutil.ignore_patterns("workers"))
    with serve(models[0], *flags) as gateway:
        gateway.wait_until_ready()
        assert gateway.status().workers[0].pid == worker.pid
        replace(gateway, models[1])
        gateway.kill()
    for path in home.iterdir():
        if path.is_file():
            path.unlink()
    shutil.copytree(copy, home, dirs_exist_ok=True)
    with serve(models[0], *flags) as gateway:
        gateway.wait_until_ready()
        assert gateway.model().fingerprint == first.fingerprint
        text.gateway = gateway
        for each in (text, Text(gateway)):
            assert each.finish() == hf_greedy(models[0], each.prompt, len(each.tokens))
