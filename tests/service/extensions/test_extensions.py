"""A gateway without its extensions, and with one that is not Quire's."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from quire.v1 import executor_pb2

from benchmarks.checkout import ROOT
from benchmarks.gateway_process import GatewayProcess
from tests import undisturbed

OWN = sorted(path.name for path in (ROOT / "service" / "extensions").iterdir() if path.is_dir())
PROMPT = [3, 1, 4, 1, 5]


def decode_some(gateway: GatewayProcess) -> list[int]:
    answer = gateway.stub.Prefill(executor_pb2.PrefillRequest(token_ids=PROMPT))
    text = [answer.output.token_id]
    for _ in range(3):
        request = executor_pb2.DecodeRequest(cache_id=answer.kv_cache.cache_id, token_id=text[-1])
        text.append(gateway.stub.Decode(request).output.token_id)
    return text


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


@pytest.mark.parametrize("names", [OWN, *([name] for name in OWN)], ids=["all", *OWN])
def test_the_core_runs_without_extensions(tmp_path: Path, names: list[str]) -> None:
    root = without(names, tmp_path)
    with GatewayProcess(model="paged-attention", root=root) as gateway:
        assert decode_some(gateway) == undisturbed.greedy(PROMPT, 4)
    log = gateway.log_path.read_text()
    for name in names:
        assert re.search(f'"extension": ?"{name}"', log), "it is said that it is missing"


def test_the_extension_of_the_manual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "extensions.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    told = tomllib.loads(project)
    (module,) = told["tool"]["setuptools"]["py-modules"]
    (tmp_path / f"{module}.py").write_text(code)
    # What an installation of it writes.
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['project']['name']}\nVersion: 1.0\n")
    points = told["project"]["entry-points"]["quire.extensions"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[quire.extensions]", *lines]))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    flags = ["--access-log", str(tmp_path / "access.log")]
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        decode_some(gateway)
    calls = [
        line.split()[0].rpartition("/")[2] for line in (tmp_path / "access.log").read_text().splitlines()
    ]
    assert calls.count("Prefill") == 1 and calls.count("Decode") == 3
