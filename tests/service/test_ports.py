"""Ports that follow from several settings: each is one, and nothing else of this server has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quire.cli.main import complete_parser

from service.config import Config
from service.extensions.gateways import parent
from service.extensions.gateways.one_host import Place
from service.extensions.metrics.settings import MetricsSettings
from service.setting_rules import are_addresses
from service.settings import ConfigError
from service.shard import Shard
from tests.load_config import load_config

TWO = {"gateways": "2", "workers": "2"}
ONE_HAS = "gateways = 2, gateway 1 has "
OPENAI = {"openai_listen": "localhost:7001"}


@pytest.mark.parametrize(
    ("flags", "setting", "said"),
    [
        (TWO | {"metrics_listen": "127.0.0.1:50050"}, "metrics_listen", ONE_HAS + "127.0.0.1:50051: listen"),
        (TWO | {"metrics_listen": "0.0.0.0:50050"}, "metrics_listen", ONE_HAS + "0.0.0.0:50051: listen"),
        (
            TWO | {"metrics_listen": "127.0.0.1:65535"},
            "metrics_listen",
            "each of gateways = 2, of .* last is 65535",
        ),
        (
            TWO | {"metrics_listen": "127.0.0.1:8079", "openai_listen": "127.0.0.1:8080"},
            "metrics_listen",
            "gateway 1 has 127.0.0.1:8080: openai_listen has this port already",
        ),
        (
            TWO | OPENAI | {"metrics_listen": "127.0.0.1:7001"},
            "openai_listen",
            "metrics_listen has this port",
        ),
        (TWO | {"openai_listen": "127.0.0.1:50051"}, "openai_listen", "listen has this port already"),
        ({"listen": "127.0.0.1:7", "metrics_listen": "127.0.0.1:7"}, "metrics_listen", "already"),
        (OPENAI | {"metrics_listen": "0.0.0.0:7001"}, "openai_listen", "already"),
        ({"openai_listen": "[::1]:7", "metrics_listen": "[::]:7"}, "openai_listen", "already"),
        # Also after a restart.
        ({"pool": "POOL", "pool_listen": "127.0.0.1:0"}, "pool_listen", "needs a port that workers know"),
        ({"advertise": "host:0"}, "advertise", "without port 0"),
    ],
)
def test_ports_that_are_refused(flags: dict[str, str], setting: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_config({name: value.replace("POOL", str(tmp_path)) for name, value in flags.items()}, {})
    assert refused.value.setting == setting


@pytest.mark.parametrize(
    "addresses",
    [
        {"openai_listen": "[::1]:7001", "metrics_listen": "0.0.0.0:7001"},
        OPENAI | {"metrics_listen": "127.0.0.2:7001"},
        {"openai_listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"},
        OPENAI | {"listen": "unix:/one"},
    ],
)
def test_two_ports_have_two_addresses(addresses: dict[str, str]) -> None:
    """Whether they are in use now is another question."""
    load_config(addresses, {})


def test_the_last_ports_and_free_ones_are_possible() -> None:
    config = load_config(TWO | {"metrics_listen": "127.0.0.1:65534", "openai_listen": "127.0.0.1:0"}, {})
    of_each = [config.of_gateway(index).of(MetricsSettings).metrics_listen for index in range(2)]
    assert of_each == ["127.0.0.1:65534", "127.0.0.1:65535"]
    config = load_config(TWO | {"metrics_listen": "127.0.0.1:0", "openai_listen": "127.0.0.1:0"}, {})
    assert config.of_gateway(1).of(MetricsSettings).metrics_listen == "127.0.0.1:0"
    load_config({"metrics_listen": "127.0.0.1:65535"}, {})
    # Of one gateway the next port is free.
    load_config({"metrics_listen": "127.0.0.1:50050"}, {})


def test_each_gateway_is_told_its_port() -> None:
    config = (
        Config()
        .with_values({"gateways": 2, "metrics_listen": "[::1]:9000"})
        .with_values({"pool_listen": "0.0.0.0:50060"})
    )
    for index in range(2):
        line = json.loads(parent._first_line(config, Place(Shard(index, 2), None, [], "")))
        assert line["config"]["metrics_listen"] == f"[::1]:{9000 + index}"
        assert line["config"]["pool_listen"] == f"0.0.0.0:{50060 + index}"


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ("a:1,a:2", True),
        ("a:1,b:1", True),
        ("a:1,A:1", False),
        ("a:0", False),
        ("localhost:1,127.0.0.1:1", False),
        ("a:70000", False),
    ],
)
def test_gateways_of_a_worker_are_different_ones(value: str, is_valid: bool) -> None:
    assert are_addresses(value) == is_valid


@pytest.mark.parametrize("listen", ["0.0.0.0:500610", "h:+1", "h", "", "unix:/x", "h:-1"])
def test_a_worker_needs_a_port_that_there_is(listen: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        complete_parser().parse_args(["worker", "--pool", "p", "--gateway", listen])
    assert "--gateway: " in capsys.readouterr().err
