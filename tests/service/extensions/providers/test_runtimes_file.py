"""The file of runtimes: valid settings, errors, and reloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from quire.v1 import admin_pb2

from service.admin import AdminApi
from service.api.server_state import ServerState
from service.config import Config
from service.errors import BadRuntimes, InvalidArgument, RuntimeNotFound
from service.extensions.providers.runtime import RemoteRuntime
from service.extensions.providers.runtimes_file import RuntimesFile, load
from service.journal.values import StoredValues
from tests.service.runtimes.fake_runtime import FakeRuntime
from tests.service.served import state_of

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
requests_per_minute = 60

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
    gpt, other = found.runtimes.values()
    assert (gpt.name, gpt.requests_per_minute, gpt.price) == ("gpt", 60, gpt.prices["m"])
    assert other.model == "c"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[routing]", "[routes]", "routes is not known; there are routing, runtimes"),
        ('"local-first"', '"best"', "routing.policy: must be one of order, local-first, cheapest"),
        ("local_max_wait_s = 2", "local_max_wait_s = -1", "routing.local_max_wait_s"),
        ("local_max_wait_s = 2", "local_max_wait_s = nan", "routing.local_max_wait_s"),
        ('when_full = "queue"', 'when = "queue"', "[routing]: when is not known"),
        ("[runtimes.other]", "[runtimes.local]", "the name is that of the server's own workers"),
        ('dialect = "anthropic-messages"\n', "", "[runtimes.other]: dialect is needed"),
        ('"anthropic-messages"', '"telepathy"', "dialect"),
        ('model = "c"', "model = 3", "runtimes.other.model: must be a str"),
        ('model = "c"', 'model = "c"\nmax_concurrent = 1.5', "runtimes.other.max_concurrent: must be a int"),
        ('model = "c"', 'model = "c"\nkey = "sk-secret"', "[runtimes.other]: key is not known"),
        ("http://127.0.0.1:9/v1", "http://example.com/v1", "base_url"),
        ("output_usd = 2.5", "output_usd = -1", "runtimes.gpt.prices.m.output_usd: must be a number"),
        ("output_usd = 2.5", "", "[runtimes.gpt.prices.m]: output_usd is needed"),
        ("output_usd = 2.5", f"output_usd = {10**400}", "[runtimes.gpt.prices.m]: must be finite"),
        ("_minute = 60", f"_minute = {10**400}", "requests_per_minute: must be finite"),
        ("output_usd = 2.5", f"output_usd = 1{'0' * 5000}", "is not TOML"),
        ("output_usd = 2.5", "output_usd = inf", "[runtimes.gpt.prices.m]: must be finite"),
        ("prices.m]", "prices.n]", "budget_usd_per_hour"),
        ("http://127.0.0.1:9/v1", "https://user:sk-secret@example.com/v1", "base_url"),
        ("http://127.0.0.1:9/v1", "https://example.com/v1?key=sk-secret", "base_url"),
        ("http://127.0.0.1:9/v1", "https://example.com:sk-secret/v1", "base_url"),
        ("http://127.0.0.1:9/v1", "ftp://example.com", "base_url"),
        ('"SOME_KEY"', '"sk-secret"\napi_key_file = "x"', "api_key_env and api_key_file"),
        ('model = "c"', 'model = ""', "model: must not be empty"),
        ('model = "c"', 'model = "c"\nmax_concurrent = 0', "max_concurrent: must be more than 0"),
        ('model = "c"', 'model = "c"\nread_timeout_s = nan', "read_timeout_s: must be a number from 0"),
        ('model = "c"', 'model = "c"\nrequests_per_minute = inf', "requests_per_minute: must be finite"),
        ('model = "c"', 'model = "c"\nmax_tokens_field = "tokens"', "max_tokens_field: must be one of"),
        ('model = "c"', 'model = "c"\nname = "d"', "[runtimes.other]: name is not known"),
        (
            "[runtimes.gpt.prices.m]",
            "[runtimes.gpt.prices]",
            "runtimes.gpt.prices.input_usd: must be a table",
        ),
        ("[routing]", "[routing", "line 2: is not TOML"),
        ("[runtimes.gpt]", 'key = "sk-secret', "line 7: is not TOML"),
    ],
)
def test_a_bad_setting_is_refused_with_its_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(BadRuntimes) as raised:
        load(written(tmp_path, GOOD.replace(old, new)))
    assert says in str(raised.value)
    assert "sk-secret" not in str(raised.value) and str(tmp_path) not in str(raised.value)


def opened(path: Path) -> RuntimesFile:
    file = RuntimesFile(path)
    file.open_router(FakeRuntime("local"), StoredValues())
    return file


def admin_of(file: RuntimesFile, state: ServerState) -> AdminApi:
    none = cast(Any, None)
    return AdminApi(state, none, none, none, none, none, file.router, file.read_again, none)


async def rebuilt(file: RuntimesFile, runtime: str = "") -> int:
    """The number of recreated runtimes that RebuildSession reports after a change of the file."""
    api = admin_of(file, state_of(Config()))
    cause = admin_pb2.REBUILD_CAUSE_REMOTE_CONFIG_CHANGE
    request = admin_pb2.RebuildSessionRequest(runtime=runtime, cause=cause)
    return (await api.RebuildSession(request, cast(Any, None))).rebuilt


async def test_an_operator_can_reload_the_file(tmp_path: Path) -> None:
    file = opened(written(tmp_path, GOOD))
    local, gpt, _ = file.router.runtimes
    added = GOOD.replace('model = "c"', 'model = "d"') + GOOD[GOOD.index("[runtimes.other]") :].replace(
        "other", "third"
    )
    written(tmp_path, added)
    assert await rebuilt(file) == 2
    assert [runtime.name for runtime in file.router.runtimes] == ["local", "gpt", "other", "third"]
    assert file.router.runtimes[:2] == [local, gpt] and file.router.named("other").describe().model_id == "d"
    # A named runtime is always recreated: its credentials may have changed.
    assert await rebuilt(file) == 0 and await rebuilt(file, "gpt") == 1
    with pytest.raises(RuntimeNotFound):
        await rebuilt(file, "fourth")
    written(tmp_path, "")
    assert await rebuilt(file) == 0 and file.router.runtimes == [local]


UNSPECIFIED, POISONED, AUTH, CONFIG, MANUAL = sorted(admin_pb2.RebuildCause.values())


@pytest.mark.parametrize(
    ("runtime", "fitting"),
    [
        ("", {UNSPECIFIED, POISONED, CONFIG, MANUAL}),
        ("local", {UNSPECIFIED, POISONED, MANUAL}),
        ("gpt", {UNSPECIFIED, AUTH, CONFIG, MANUAL}),
    ],
)
async def test_a_cause_that_does_not_fit_the_runtime_is_refused(
    tmp_path: Path, runtime: str, fitting: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, REMOTE_AUTH_FAILURE without a name restarted all workers."""
    file, state = opened(written(tmp_path, GOOD)), state_of(Config())
    rebuilt_for: list[int] = []

    async def rebuild(_: Any, cause: int) -> int:
        rebuilt_for.append(cause)
        return 1

    monkeypatch.setattr(FakeRuntime, "rebuild_session", rebuild)
    monkeypatch.setattr(RemoteRuntime, "rebuild_session", rebuild)
    api = admin_of(file, state)
    for cause in admin_pb2.RebuildCause.values():
        request = admin_pb2.RebuildSessionRequest(runtime=runtime, cause=cast(Any, cause))
        if cause in fitting:
            await api.RebuildSession(request, cast(Any, None))
            continue
        with pytest.raises(InvalidArgument) as refused:
            await api.RebuildSession(request, cast(Any, None))
        assert (refused.value.reason, refused.value.field) == ("BAD_CAUSE", "cause")
    assert set(rebuilt_for) == fitting - {CONFIG}


async def test_reloading_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    file = opened(written(tmp_path, GOOD))
    before = file.router.runtimes
    for text, says in (
        (GOOD + 'key = "sk-secret\n', "line 23: is not TOML"),
        (GOOD + 'key = "sk-secret"', "[runtimes.other]: key is not known"),
    ):
        written(tmp_path, text)
        with pytest.raises(BadRuntimes) as raised:
            await rebuilt(file)
        assert says in raised.value.message
        assert "sk-secret" not in raised.value.message and str(tmp_path) not in raised.value.message
        assert file.router.runtimes is before
