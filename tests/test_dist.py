"""The wheels of `make dist`: their kernels have the bits of a build on this machine, and need no compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import grpc
import pytest
import torch
from quire import Client

from kernels.cpu import library
from kernels.experts import experts, pack_experts
from kernels.gated_activation import ACTIVATIONS, gated_activation
from kernels.linear import DenseWeight, linear, pack_weight
from kernels.rms_norm import add_rms_norm
from kernels.rope import RopeSpec, rope_table
from kernels.rope_kv_write import rope_kv_write
from tests.kernels.attention_case import COMPILED, FEATURES, Item, attend, make_case
from tests.kernels.instruction_sets import instructions_used, need_compiled
from tests.kernels.tree_batches import Tree

ROOT = Path(__file__).resolve().parent.parent
# Minutes: the first time Zig compiles the library of C++ too.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both wheels, with kernels for the instruction set in use only: each takes half a minute to compile."""
    instructions = instructions_used()
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang, which `make dist` installs")
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, ".ci/build_wheels.py", str(out), "--instructions", instructions.name]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def test_the_server_is_one_package(wheels: Path) -> None:
    (wheel,) = wheels.glob("quire_llm_server-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in found if not name.endswith(".dist-info")} == {"quire_server"}


@pytest.fixture(scope="module")
def prebuilt(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels in the server's wheel."""
    (wheel,) = wheels.glob("quire_llm_server-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        return Path(archive.extract(name, tmp_path_factory.mktemp("kernels")))


def results(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of every kernel, for the same arguments at each call."""
    torch.manual_seed(0)
    x, weight = torch.randn(37, 144).mul(3).to(dtype), torch.randn(100, 144).to(dtype)
    found = [linear(x, pack_weight(weight), weight[:, 0].contiguous())]
    residual = torch.randn(37, 144).to(dtype)
    found += [add_rms_norm(x, residual, torch.randn(144).to(dtype), 1e-6), residual]
    found += [gated_activation(x, activation) for activation in ACTIVATIONS]
    gate_up, down = (
        pack_experts([DenseWeight(torch.randn(*shape).to(dtype)) for _ in range(4)])
        for shape in ((96, 144), (144, 48))
    )
    ids, weights = torch.rand(37, 4).topk(3).indices, torch.rand(37, 3)
    found.append(experts(x, gate_up, down, ids, weights, "silu"))
    keys, values = (torch.zeros(3, 16, 2, 24, dtype=dtype) for _ in range(2))
    table = rope_table(RopeSpec(theta=10_000.0), 16, 37)
    norm, slots = torch.randn(4, 24).to(dtype), torch.arange(37)
    found += [rope_kv_write(x, norm, table, slots, keys, values, 1e-6), keys, values]
    items: list[Item] = [(1, 20), (3, 700), (40, 1100), (Tree((0, 0, 1)), 30)]
    for features in ((), *FEATURES):
        found.append(attend(make_case(items, dtype=dtype, features=features, width=80), COMPILED))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_those_of_a_build_on_this_machine(
    prebuilt: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiled()
    here = results(dtype)
    loaded = ctypes.CDLL(str(prebuilt))
    monkeypatch.setattr(library, "load", lambda: loaded)
    library.function.cache_clear()
    try:
        assert library.function("quire_philox_uniform", ()) is not None
        there = results(dtype)
    finally:
        library.function.cache_clear()
    for index, (one, other) in enumerate(zip(here, there, strict=True)):
        assert one.isfinite().all() and torch.equal(one, other), index


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has Quire only from the wheels, and all else from ours."""
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(environment)]
    options = ["--quiet", "--no-deps", "--no-index", *map(str, wheels.glob("*.whl"))]
    subprocess.run([*pip, "install", *options], check=True)
    # Paths in it are added, but not the checkout, which a file there points to.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


def test_installed_it_serves_with_compiled_kernels_without_a_compiler(
    installed: Path, tmp_path: Path
) -> None:
    instructions = instructions_used()
    # No compiler is on PATH, and the checkout is not on PYTHONPATH.
    settings = {"PATH": str(installed), "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    if library.VARIABLE in os.environ:
        settings[library.VARIABLE] = os.environ[library.VARIABLE]
    target = f"unix:{tmp_path / 'socket'}"
    home = tmp_path / "home"
    serve = ["serve", "--model", "adder", "--listen", target, "--data-dir", str(home)]
    command = [str(installed / "quire"), *serve]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=settings, stdout=log, stderr=log)
    try:
        with grpc.insecure_channel(target) as channel:
            grpc.channel_ready_future(channel).result(timeout=120)
        with Client(target) as client:
            until_s = time.monotonic() + 120
            while not (kernels := [name for w in client.status().workers for name in w.executor.kernels]):
                assert server.poll() is None and time.monotonic() < until_s, (tmp_path / "log").read_text()
                time.sleep(0.1)
            assert kernels == ["torch", f"cpu-{instructions.name}"]
            assert "".join(chunk.text for chunk in client.execute("12+34=")) == "46"
        check = [str(installed / "quire"), "serve", "--check"]
        subprocess.run(check, cwd=tmp_path, env=settings, check=True)
    finally:
        server.terminate()
        server.wait(60)
