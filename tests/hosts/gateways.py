"""The soak of several gateways: `python -m tests.hosts.gateways --faults 500 --seed 1` (needs root).

Two gateways, a PostgreSQL, four workers and the callers have a network namespace each. Gateways, workers and
the database are killed, stopped and paused; the links between them are cut in one direction or both, late and
lossy. Prints JSON. The exit status is 0 if every token was right, and nothing else happened that must not.
What is right transformers says, or without a model an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine
from tests.hosts.network import CALLER, DATABASE, Network, gateway_hosts, missing, worker_hosts
from tests.postgres_server import programs
from tests.soak.options import WEIGHTLESS, parser

if TYPE_CHECKING:
    from tests.hosts.cluster import Cluster
    from tests.hosts.takeovers import Takeovers
    from tests.soak.callers import Texts
    from tests.soak.tally import Tally

_LONGEST_TEXT = 150
_CHANNEL = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
)


def lacks() -> str:
    """What this machine lacks for it; "" if nothing."""
    if found := missing():
        return found
    if programs() is None:
        return "needs initdb of PostgreSQL"
    return "" if shutil.which("setpriv") else "needs the program setpriv"


def main() -> int:
    """Runs the command line."""
    command = parser(
        *("python -m tests.hosts.gateways", __doc__),
        faults=500,
        minutes=120.0,
        texts=20,
        workers=4,
        model=WEIGHTLESS,
    )
    command.add_argument("--shards", type=int, default=4, help="of the caches")
    command.add_argument("--longest-s", type=float, default=4.0, help="how long something is away at most")
    command.add_argument(
        "--spare-workers", action="store_true", help="kill none: on a busy machine they start slowly"
    )
    command.add_argument("--keep", type=Path, help="keep the logs in this directory")
    options = command.parse_args()
    if found := lacks():
        print(f"tests.hosts.gateways: {found}", file=sys.stderr)
        return 2
    hosts = [*gateway_hosts(2), DATABASE, CALLER, *worker_hosts(options.workers)]
    with contextlib.ExitStack() as stack:
        scratch = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-hosts-"))
        )
        scratch.mkdir(parents=True, exist_ok=True)
        network = stack.enter_context(Network(hosts, options.seed))
        network.enter(CALLER)
        # Not before: gRPC opens connections on threads that it starts when it is imported.
        from tests.hosts.cluster import Cluster
        from tests.hosts.takeovers import Takeovers

        model, texts = _model_and_texts(options, scratch)
        takeovers = Takeovers()
        cluster = stack.enter_context(Cluster(network, scratch, options, model))
        tally = asyncio.run(soak(options, texts, cluster, takeovers))
    described = {"seed": options.seed, "model": options.model, "machine": machine.describe()}
    print(json.dumps(described | tally.summary() | {"takeover_s": takeovers.summary()}, indent=2))
    return 0 if tally.is_clean() and tally.num_faults >= min(options.faults, 1) else 1


def _model_and_texts(options: argparse.Namespace, scratch: Path) -> tuple[str, Texts]:
    """What is served, and prompts with what follows."""
    from tests.soak.callers import Texts

    if options.model == WEIGHTLESS:
        return WEIGHTLESS, Texts.of_weightless(options.texts, options.seed, _LONGEST_TEXT)
    # Libraries that take seconds.
    from tests.model_factory import TinyModel, hf_greedy, make_model

    model = make_model(scratch / "model", TinyModel())
    texts = Texts.of(options.texts, TinyModel().vocab_size, options.seed)
    for prompt in texts.prompts:
        texts.add("", prompt, [*prompt, *hf_greedy(model, list(prompt), _LONGEST_TEXT - len(prompt))])
    return str(model), texts


async def soak(options: argparse.Namespace, texts: Texts, cluster: Cluster, takeovers: Takeovers) -> Tally:
    """Runs one."""
    from quire import AsyncClient, Tls
    from quire.v1 import executor_pb2_grpc

    from tests.hosts.cluster_faults import ClusterInjector
    from tests.hosts.spread import ClientCaller, PlainCaller, Spread
    from tests.soak.callers import Stuck
    from tests.soak.checks import check_pools, until, wait_until_serving
    from tests.soak.tally import Tally
    from workers.common.protocol import GATEWAY_NAME

    tally = Tally()
    async with contextlib.AsyncExitStack() as stack:
        channels = {
            gateway.address: await stack.enter_async_context(cluster.connect(gateway, _CHANNEL))
            for gateway in cluster.gateways
        }
        stubs = [executor_pb2_grpc.ModelExecutorServiceStub(channel) for channel in channels.values()]
        for stub in stubs:
            await wait_until_serving(stub, cluster)
        client = await stack.enter_async_context(
            AsyncClient(
                list(channels),
                timeout_s=90,
                tls=Tls(ca=cluster.ca, server_name=GATEWAY_NAME),
                token=cluster.token,
            )
        )
        callers: list[Any] = [
            PlainCaller(n, Spread(channels, takeovers, learns=n % 2 == 0), texts, tally, options.seed)
            for n in range(options.callers)
        ]
        callers += [ClientCaller(1000, client, texts, tally)]
        stop, no_more = asyncio.Event(), asyncio.Event()
        injector = ClusterInjector(
            cluster,
            tally,
            takeovers,
            options.seed,
            options.interval_s,
            options.longest_s,
            kills_workers=not options.spare_workers,
        )
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(injector.watch())
                faults = group.create_task(injector.run(no_more))
                running = [group.create_task(caller.run(stop)) for caller in callers]
                await until(lambda: tally.num_faults >= options.faults, options.minutes, tally)
                no_more.set()
                await faults
                stop.set()
                await asyncio.wait(running)
                await check_pools(stubs, options.workers, tally)
                watch.cancel()
        except* Stuck as stuck:
            tally.lose("unexpected errors", f"{stuck.exceptions[0]}\n{cluster.log_tail()}")
    for failed in cluster.stop():
        tally.lose("unexpected errors", f"{failed}\n{cluster.log_tail()}")
    return tally


if __name__ == "__main__":
    sys.exit(main())
