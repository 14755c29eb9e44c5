"""What `ray_address` takes and refuses, and the certificates that it makes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from service.pool import pool_files
from service.settings import ConfigError
from tests.load_config import load_config


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"ray_resources": "GPU"}, "ray_resources"),
        ({"ray_resources": "GPU=1,"}, "ray_resources"),
        ({"ray_resources": "GPU=-1"}, "ray_resources"),
        ({"workers": "auto", "pool_listen": "a:1", "pool": "."}, "workers"),
        ({"ray_address": "auto", "orphan_grace_s": "0"}, "orphan_grace_s"),
        ({"ray_address": "auto", "workers_at": "a:1", "pool": "."}, "workers_at"),
        ({"ray_address": "auto", "pool_listen": "a:1", "pool": "."}, "pool_listen"),
    ],
)
def test_refused(settings: dict[str, str], refused: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings, {})
    assert caught.value.setting == refused


def test_taken() -> None:
    """The model is looked for where workers are."""
    settings = {"ray_address": "auto", "model": "/of/the/nodes", "ray_resources": "GPU=0.5,CPU=4,my-kind=1"}
    config = load_config(settings, {})
    assert config.has_remote_workers and config.worker_slots == 1
    assert load_config(settings | {"workers": "auto"}, {}).workers is None


def test_a_pool_is_made_once(tmp_path: Path) -> None:
    pool = pool_files.own_pool(tmp_path / "data")
    made = {path.name: path.read_bytes() for path in pool.iterdir()}
    assert {"ca.pem", "worker.pem", "worker-key.pem", "gateway.pem", "gateway-key.pem"} <= made.keys()
    assert {stat.S_IMODE(path.stat().st_mode) for path in [pool, *pool.iterdir()]} == {0o700, 0o600}
    assert pool_files.own_pool(tmp_path / "data") == pool
    assert {path.name: path.read_bytes() for path in pool.iterdir()} == made
    assert list((tmp_path / "data").iterdir()) == [pool]
    with pytest.raises(ConfigError, match="data_dir"):
        pool_files.own_pool(None)
