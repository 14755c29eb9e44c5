"""The commands of docs/upgrades.md, run by a shell as they are written there, but with paths of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire import Client
from quire.v1 import executor_pb2

from tests.client.pages import blocks, install_command, run_script
from tests.gateway_process import GatewayProcess

PATHS = {"/var/lib/quire": "data", "/var/backups/quire": "backup"}
SAVE, CHECK, RESTORE = range(3)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    install_command(tmp_path)
    (tmp_path / "quire.toml").write_text(f'model = "adder"\ndata_dir = "{tmp_path / "data"}"\n')
    return tmp_path


def run(here: Path, block: int) -> str:
    """What the shell prints when it runs a block of the page."""
    return run_script(blocks("docs/upgrades.md", "sh")[block], here, PATHS)


def test_a_server_goes_back_to_what_was_saved(here: Path) -> None:
    flags = ["--data-dir", str(here / "data")]
    with GatewayProcess(model="adder", flags=flags) as server, Client(server.address) as client:
        saved = client.prefill([1, 2, 3])
        (here / "data" / "adapter-versions" / "1").mkdir(parents=True)
        assert "1 caches; all is well" in run(here, SAVE)
        assert (here / "backup" / "adapter-versions" / "1").exists()
        said = run(here, CHECK)
        assert "no problems" in said and "1 caches; all is well" in said
        continued = saved.decode(4)
        later = client.prefill([1, 2])
    assert "1 caches; all is well" in run(here, RESTORE)
    assert (here / "data-newer" / "journal").exists()
    with GatewayProcess(model="adder", flags=flags) as server, Client(server.address) as client:
        listed = client.stub.ListCaches(executor_pb2.ListCachesRequest())
        found = {cache.cache_id: cache.seq_len for cache in listed.kv_caches}
        assert found == {saved.cache_id: 3} and later.cache_id not in found
        assert client.cache(saved.cache_id).decode(4).token_id == continued.token_id
