"""Adapters and replaced weights: calls that are cut at bad moments, deaths of workers, and restarts."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from quire.v1 import admin_pb2

from tests.adapter_factory import make_adapter
from tests.e2e.test_adapters import FLAGS, PATIENCE_S, STEPS, Adapted, Text, ids, load, unload
from tests.e2e.test_replace_weights import replace
from tests.error_details import refused
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, hf_greedy, make_model


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"), 2)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same config."""
    return make_model(tmp_path_factory.mktemp("other") / "other", TinyModel(seed=6))


def test_a_worker_that_is_restarted_during_a_replacement_has_the_new_weights(
    adapted: Adapted, other_weights: Path
) -> None:
    """It has read them, dies, and is ready with the previous ones before another worker has read them."""
    # Longer than the silence of the stopped worker.
    flags = [*FLAGS, "--heartbeat-timeout-s", str(2 * PATIENCE_S)]
    with GatewayProcess(model=str(adapted.model), workers=2, flags=flags) as gateway:
        first, second = sorted(gateway.status().workers, key=lambda worker: worker.worker_id)
        os.kill(second.pid, signal.SIGSTOP)
        replacing = threading.Thread(target=replace, args=(gateway, other_weights))
        replacing.start()
        try:
            time.sleep(1)
            os.kill(first.pid, signal.SIGKILL)
            ready = f'"worker ready", "worker_id": "{first.worker_id}"'
            gateway.wait_until(lambda: gateway.log().count(ready) == 2)
        finally:
            os.kill(second.pid, signal.SIGCONT)
        replacing.join()
        for _ in range(4):
            text = Text(gateway)
            assert text.weights == 1
            assert text.finish() == hf_greedy(other_weights, text.prompt, STEPS)


def test_loads_are_answered_while_weights_are_replaced(adapted: Adapted, other_weights: Path) -> None:
    with GatewayProcess(model=str(adapted.model), flags=FLAGS) as gateway:
        ended = threading.Event()
        errors: list[grpc.RpcError] = []

        def load_again_and_again() -> None:
            try:
                while not ended.is_set():
                    load(gateway, "a", adapted.adapters[0])
            except grpc.RpcError as error:
                errors.append(error)

        loading = threading.Thread(target=load_again_and_again)
        loading.start()
        for turn in range(30):
            replace(gateway, other_weights if turn % 2 == 0 else adapted.model)
        ended.set()
        loading.join()
        assert not errors
        assert Text(gateway, "a").finish() == adapted.tokens[1]


def test_odd_files_are_refused_and_not_left_open(adapted: Adapted, home: Path) -> None:
    (home / "adapter_config.json").mkdir()
    nameless = admin_pb2.LoadAdapterRequest(adapter_id="a", file=admin_pb2.AdapterFile(data=b"x"))
    with GatewayProcess(model=str(adapted.model), flags=FLAGS) as gateway:
        call = gateway.admin.LoadAdapter
        before = psutil.Process(gateway.process.pid).num_fds()
        for _ in range(20):
            assert refused(lambda: load(gateway, "a", home)) == "BAD_ADAPTER"
            assert refused(lambda: call(iter([nameless]), timeout=PATIENCE_S)) == "BAD_ADAPTER"
        # Connections may come and go.
        assert psutil.Process(gateway.process.pid).num_fds() < before + 10


def test_cancelled_loads_leave_no_file(adapted: Adapted, home: Path) -> None:
    model = make_model(home / "model", TinyModel(hidden_size=512, intermediate_size=1024))
    large = make_adapter(home / "large", model, 1, rank=256)
    copies = home / "data" / "adapters"
    rng = random.Random(1)
    with GatewayProcess(model=str(model), flags=[*FLAGS, "--data-dir", str(home / "data")]) as gateway:
        for _ in range(60):
            request = admin_pb2.LoadAdapterRequest(adapter_id="a", source=str(large))
            call = gateway.admin.LoadAdapter.future(iter([request]), timeout=PATIENCE_S)
            # A load takes some 100 ms.
            time.sleep(rng.random() * 0.06)
            call.cancel()
        unload(gateway, "a")
        gateway.wait_until(lambda: not copies.is_dir() or not any(copies.iterdir()))
        assert not ids(gateway)


def test_another_gateway_knows_the_directory_of_adapters(adapted: Adapted, home: Path) -> None:
    """Its workers outlive a gateway, with KV of adapters that are others when the next one starts."""
    directory = home / "adapters"
    for name, source in zip(("one", "two"), adapted.adapters, strict=True):
        shutil.copytree(source, directory / name)
    flags = [*FLAGS, "--adapters", str(directory), "--data-dir", str(home / "data"), "--orphan-grace-s", "60"]
    with GatewayProcess(model=str(adapted.model), flags=flags) as gateway:
        kept = Text(gateway, "one")
        kept.decode(2)
        gateway.kill()
    with GatewayProcess(model=str(adapted.model), flags=flags) as gateway:
        kept.gateway = gateway
        assert kept.finish() == adapted.tokens[1]
        kept.release()
        for name, tokens in zip(("one", "two"), adapted.tokens[1:], strict=True):
            text = Text(gateway, name)
            assert text.finish() == tokens
            text.release()
        gateway.kill()
    (directory / "one").rename(directory / "other")
    (directory / "two").rename(directory / "one")
    (directory / "other").rename(directory / "two")
    with GatewayProcess(model=str(adapted.model), flags=flags) as gateway:
        assert Text(gateway, "one").finish() == adapted.tokens[2]
        assert Text(gateway, "two").finish() == adapted.tokens[1]
