"""A gateway without its extensions, and with one that is not Quire's."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from quire.v1 import executor_pb2

from benchmarks.checkout import ROOT, environment, quire_command
from service.config import Config
from service.extensions.conformance import appended
from service.journal.base import Journal, JournalUnusable
from service.journal.recovery import Apply
from service.shard import open_shard
from tests import undisturbed
from tests.gateway_process import GatewayProcess

OWN = sorted(
    path.name for path in (ROOT / "service" / "extensions").iterdir() if (path / "extension.py").exists()
)
PROMPT = [3, 1, 4, 1, 5]


def decode_some(gateway: GatewayProcess) -> list[int]:
    answer = gateway.stub.Prefill(executor_pb2.PrefillRequest(token_ids=PROMPT))
    text = [answer.output.token_id]
    for _ in range(3):
        request = executor_pb2.DecodeRequest(cache_id=answer.kv_cache.cache_id, token_id=text[-1])
        text.append(gateway.stub.Decode(request).output.token_id)
    return text


def decode(gateway: GatewayProcess, cache_id: str, position: int, token: int) -> int:
    request = executor_pb2.DecodeRequest(cache_id=cache_id, token_id=token, position=position)
    return gateway.stub.Decode(request).output.token_id


def without(names: list[str], place: Path) -> Path:
    """A checkout without these extensions."""
    shutil.copytree(
        ROOT / "service",
        place / "service",
        ignore=lambda directory, _: names if directory.endswith("extensions") else ["__pycache__"],
    )
    for name in ("workers", "kernels", "clients", "pyproject.toml"):
        (place / name).symlink_to(ROOT / name)
    return place


def test_the_core_runs_without_extensions(tmp_path: Path) -> None:
    """None imports another one, as test_architecture.py checks: what runs without all runs without each."""
    root = without(OWN, tmp_path)
    with GatewayProcess(model="paged-attention", root=root) as gateway:
        assert decode_some(gateway) == undisturbed.greedy(PROMPT, 4)
    log = gateway.log_path.read_text()
    for name in OWN:
        assert re.search(f'"extension": ?"{name}"', log), "it is said that it is missing"


NO_JOURNAL = "no extension that is installed has such a journal"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gateways", "2", "--workers", "2"], "--gateways is not known"),
        (["--journal", "postgresql://quire@127.0.0.1:1/q"], NO_JOURNAL),
    ],
)
def test_what_only_a_removed_extension_can_do_is_refused(tmp_path: Path, flags: list[str], said: str) -> None:
    """And not done in another way, which would look as if it had worked."""
    root = without(["gateways"], tmp_path)
    command = quire_command(root, "serve", "--listen", "127.0.0.1:0", "--model", "paged-attention", *flags)
    done = subprocess.run(command, env=environment(root), cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr


def install(place: Path, module: str, code: str, name: str, points: dict[str, str]) -> None:
    """What an installation of a package with one module writes."""
    (place / f"{module}.py").write_text(code)
    info = place / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[quire.extensions]", *lines]))


def use(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the servers that a test starts."""
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)


def installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the packages of the manual."""
    page = (ROOT / "docs" / "extensions.md").read_text()
    blocks = re.findall(r"```(python|toml)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == [*["python", "toml"] * 2, "python"]
    (place / "test_lines_journal.py").write_text(blocks.pop()[1])
    for (_, code), (_, project) in zip(blocks[::2], blocks[1::2], strict=True):
        told = tomllib.loads(project)
        (module,) = told["tool"]["setuptools"]["py-modules"]
        points = told["project"]["entry-points"]["quire.extensions"]
        install(place, module, code, told["project"]["name"], points)
    use(place, monkeypatch)


def test_the_extensions_of_the_manual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls have lines, and caches survive a gateway that is killed while it writes one of its journal."""
    installed(tmp_path, monkeypatch)
    path, log = tmp_path / "caches.jsonl", tmp_path / "access.log"
    flags = ["--journal", f"lines://{path}", "--access-log", str(log)]
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        answer = gateway.stub.Prefill(executor_pb2.PrefillRequest(token_ids=PROMPT))
        cache_id, text = answer.kv_cache.cache_id, [answer.output.token_id]
        text.append(decode(gateway, cache_id, len(PROMPT), text[-1]))
        # A line is written behind the answer.
        while "/Decode " not in log.read_text():
            time.sleep(0.01)
        assert log.read_text().count("/Prefill ") == log.read_text().count("/Decode ") == 1
        gateway.process.kill()
        gateway.process.wait()
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[-1][:20])
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        for _ in range(2):
            text.append(decode(gateway, cache_id, len(PROMPT) + len(text) - 1, text[-1]))
    assert text == undisturbed.greedy(PROMPT, 4)


def test_the_journal_of_the_manual_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tests for journals, as the manual says how to run them."""
    installed(tmp_path, monkeypatch)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lines_journal.py"]
    place = environment(ROOT)
    done = subprocess.run(command, env=place, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert re.search(r"\n\d+ passed, 1 skipped", done.stdout), done.stdout


def test_a_journal_whose_records_do_not_fit_is_refused_with_a_line() -> None:
    """Before, that was a traceback, unless the journal of the extension had caught what `apply` raises."""

    async def open_journal(_config: Config, _directory: Path | None, apply: Apply) -> Journal:
        apply(appended(1, 0, 7), 0.0)
        return Journal()

    with pytest.raises(JournalUnusable, match="records do not fit: cache 1 is unknown"):
        asyncio.run(open_shard(Config(), open_journal, None))


LAUNCHER = """
from service.config import ExtensionSettings
from service.extension import Extension
from service.pool.local import LocalLauncher

class Told(LocalLauncher):
    async def start(self, config):
        with open("FILE", "a") as file:
            file.write(config.worker_id + "\\n")
        return await super().start(config)

class Settings(ExtensionSettings):
    starts_workers = True

    def open_extension(self, config):
        extension = Extension()
        extension.launcher = lambda config, directory: Told(directory, 0.0)
        return extension
"""


def test_an_extension_that_starts_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    code = LAUNCHER.replace("FILE", str(started))
    install(tmp_path, "theirs", code, "quire-theirs", {"launcher": "theirs:Settings"})
    use(tmp_path, monkeypatch)
    with GatewayProcess(model="paged-attention", workers=1) as gateway:
        assert decode_some(gateway) == undisturbed.greedy(PROMPT, 4)
    assert started.read_text().split() == ["worker-0"]


OPENED = """
from service.config import ExtensionSettings
from service.extension import Extension

class Theirs(Extension):
    journal = launcher = print

class Settings(ExtensionSettings):
    def open_extension(self, config): return """
TWO_HAVE_IT = "only one extension can have the launcher, and first and second do"
FAILED = "the extension first, of the package quire-theirs, failed: "


@pytest.mark.parametrize(
    ("code", "points", "said", "flags"),
    [
        ("import os\nos.nothing\n", ["first"], FAILED + "AttributeError: .*theirs.py:2", []),
        (OPENED + "1 / 0\n", ["first"], FAILED + "ZeroDivisionError: .*theirs.py:", []),
        (OPENED + "Theirs()\n", ["first", "second"], TWO_HAVE_IT, ["--check"]),
    ],
    ids=["import", "start", "two"],
)
def test_an_extension_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, points: list[str], said: str, flags: list[str]
) -> None:
    """Before, that was a traceback; or of two journals the first one by name was used."""
    install(tmp_path, "theirs", code, "quire-theirs", dict.fromkeys(points, "theirs:Settings"))
    use(tmp_path, monkeypatch)
    command = quire_command(ROOT, "serve", "--listen", "127.0.0.1:0", "--model", "paged-attention", *flags)
    done = subprocess.run(command, env=environment(ROOT), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert re.match(f"quire: {said}", line)
