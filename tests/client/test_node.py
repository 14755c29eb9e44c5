"""The client for Node: its own tests against real servers, its generated code, its lock file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from service.auth.tokens import Role, new_token
from tests import programs
from tests.certificates import Authority
from tests.gateway_process import GatewayProcess

CLIENT = Path(__file__).resolve().parents[2] / "clients" / "node"
LOCK_FILE = CLIENT / "package-lock.json"
OLDEST_NODE = 20
INSTALL_TIMEOUT_S = 200
TEST_TIMEOUT_S = 200
# What npm says where it has no network.
UNREACHABLE = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT|ERR_SOCKET_TIMEOUT"
)


def run(
    *command: str, timeout_s: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command,
        cwd=CLIENT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            # Its children too, which would hold the pipes open.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.fixture(scope="module")
def installed() -> None:
    """What the client needs is in its node_modules; installed once for each state of the lock file."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node with npm")
    version = programs.output_of("node", "--version").strip()
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node is {version}, and the client needs {OLDEST_NODE} or later")
    modules = CLIENT / "node_modules"
    wanted = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()
    modules.mkdir(exist_ok=True)
    # Another process of the same test run may be installing it.
    with (CLIENT / "node_modules.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = modules / ".quire-installed"
        if mark.exists() and mark.read_text() == wanted:
            return
        done = run("npm", "ci", "--fetch-retries", "1", timeout_s=INSTALL_TIMEOUT_S)
        if done.returncode != 0 and UNREACHABLE.search(done.stderr):
            pytest.skip("npm cannot fetch what the client needs: there is no network")
        assert done.returncode == 0, done.stderr
        mark.write_text(wanted)


@pytest.fixture(scope="module")
def run_tests(installed: None) -> str:
    """The second part of `npm test`. The first one compiles, for long: once for each state of the sources."""
    scripts = json.loads((CLIENT / "package.json").read_text(encoding="utf-8"))["scripts"]
    build, _, command = scripts["test"].partition(" && ")
    assert build == scripts["build"]
    digest = hashlib.sha256(LOCK_FILE.read_bytes())
    for path in sorted([*CLIENT.glob("*.json"), *CLIENT.glob("src/**/*.ts")]):
        digest.update(repr((str(path), path.read_bytes())).encode())
    mark = CLIENT / "dist" / ".quire-compiled"
    with (CLIENT / "node_modules.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists() or mark.read_text() != digest.hexdigest():
            shutil.rmtree(CLIENT / "dist", ignore_errors=True)
            done = run("npm", "run", "build", timeout_s=TEST_TIMEOUT_S)
            assert done.returncode == 0, done.stdout
            mark.write_text(digest.hexdigest())
    return str(command)


def test_the_node_client_against_real_servers(run_tests: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.server()
    token, line = new_token("alice", [Role.CALL])
    tokens = tmp_path / "tokens"
    tokens.write_text(f"[tokens]\n{line}")
    with GatewayProcess(model="adder") as gateway, Guarded(pair.cert, pair.key, tokens) as guarded:
        told = {"target": guarded.address, "ca": str(authority.cert), "token": token}
        environment = {"QUIRE_TARGET": gateway.address, "QUIRE_GUARDED": json.dumps(told)}
        done = run("sh", "-c", run_tests, timeout_s=TEST_TIMEOUT_S, environment=environment)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{gateway.log()}"
        ran = re.search(r"^# pass (\d+)\n.*?^# skipped (\d+)$", done.stdout, re.MULTILINE | re.DOTALL)
        assert ran and int(ran[1]) > 0 and int(ran[2]) == 0, done.stdout
        gateway.assert_pools_are_whole()


class Guarded(GatewayProcess):
    """A server with TLS and tokens. The harness has neither: it cannot ask whether it is ready."""

    def __init__(self, cert: Path, key: Path, tokens: Path) -> None:
        flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--tokens", str(tokens)]
        super().__init__(model="paged-attention", flags=["--kv-pages", "64", *flags])

    def wait_until_ready(self) -> None:  # type: ignore[override]
        """A prefill waits for a worker by itself."""


@pytest.mark.usefixtures("installed")
def test_the_generated_code_is_that_of_the_protos() -> None:
    done = run("npm", "run", "check-generated", timeout_s=TEST_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_without_its_plugin_the_generator_deletes_nothing(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    shutil.copy(CLIENT / "generate.mjs", tmp_path)
    kept = tmp_path / "src" / "gen" / "kept.ts"
    kept.parent.mkdir(parents=True)
    kept.write_text("// generated")
    done = programs.run("node", "generate.mjs", cwd=tmp_path)
    assert done.returncode == 1
    assert "npm ci" in done.stderr
    assert kept.read_text() == "// generated"


def test_versions_are_ranges_for_users_and_pinned_for_us_and_no_registry_is_named() -> None:
    package = json.loads((CLIENT / "package.json").read_text(encoding="utf-8"))
    ranges, pins = package["dependencies"], package["devDependencies"]
    assert all(re.fullmatch(r"\^\d+\.\d+\.\d+", version) for version in ranges.values()), ranges
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in pins.values()), pins
    locked = json.loads(LOCK_FILE.read_text(encoding="utf-8"))["packages"]
    for name, entry in locked.items():
        assert "resolved" not in entry, name
        assert not name or entry["integrity"].startswith("sha512-"), name
