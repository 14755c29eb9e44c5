"""The file of runtimes: what it may say, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.runtimes.config_file import BadRuntimes, load
from service.runtimes.remote.config import BudgetPolicy

GOOD = """
[routing]
policy = "local-first"
local_max_wait_s = 2
when_full = "queue"

[runtimes.gpt]
dialect = "openai-chat"
base_url = "https://example.com/v1"
model = "m"
api_key_env = "SOME_KEY"
budget_usd_per_hour = 3
budget_policy = "throttle"

[runtimes.gpt.prices.m]
input_usd = 1
output_usd = 2.5

[runtimes.other]
dialect = "anthropic-messages"
base_url = "http://127.0.0.1:9/v1"
model = "c"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "runtimes.toml"
    path.write_text(text)
    return path


def test_a_file(tmp_path: Path) -> None:
    found = load(written(tmp_path, GOOD))
    assert (found.routing.policy, found.routing.when_full) == ("local-first", "queue")
    gpt, other = found.providers
    assert (gpt.name, gpt.budget_policy, gpt.price) == ("gpt", BudgetPolicy.THROTTLE, gpt.prices["m"])
    assert other.model == "c"


def test_an_empty_file_leaves_all_as_it_is(tmp_path: Path) -> None:
    assert load(written(tmp_path, "")).providers == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[routing]", "[routes]", "[routes]: is not known"),
        ('"local-first"', '"best"', "routing.policy: must be one of order, local-first, cheapest"),
        ("local_max_wait_s = 2", "local_max_wait_s = -1", "routing.local_max_wait_s"),
        ("local_max_wait_s = 2", "local_max_wait_s = nan", "routing.local_max_wait_s"),
        ('when_full = "queue"', 'when = "queue"', "routing: when is not known"),
        ("[runtimes.other]", "[runtimes.local]", "the name is that of the server's own workers"),
        ('dialect = "anthropic-messages"\n', "", "[runtimes.other]: dialect is needed"),
        ('"anthropic-messages"', '"telepathy"', "dialect"),
        ('model = "c"', "model = 3", "runtimes.other.model: must be a str"),
        ('model = "c"', 'model = "c"\nmax_concurrent = 1.5', "runtimes.other.max_concurrent: must be a int"),
        ('model = "c"', 'model = "c"\nkey = "sk-secret"', "runtimes.other: key is not known"),
        ("http://127.0.0.1:9/v1", "http://example.com/v1", "base_url"),
        ("output_usd = 2.5", "output_usd = -1", "output_usd must be a number"),
        ("output_usd = 2.5", "", "needs input_usd and output_usd"),
        ('"throttle"', '"pray"', "budget_policy: must be one of"),
        ("[routing]", "[routing", "is not TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(BadRuntimes) as raised:
        load(written(tmp_path, GOOD.replace(old, new)))
    assert says in str(raised.value) and "sk-secret" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRuntimes, match="No such file"):
        load(tmp_path / "none.toml")
