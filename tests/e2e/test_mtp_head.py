"""A model that drafts with its own head for multi-token prediction, through a gateway: the same texts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from quire.v1 import runner_pb2, types_pb2

from tests.e2e.test_execute import execute, item, tokens
from tests.gateway_process import GatewayProcess
from tests.mtp_heads import make_mtp_model
from workers.common.draft_models import MTP_HEAD

FLAGS = ["--dtype", "float32", "--kv-pages", "128", "--max-batch-tokens", "48"]
SPECULATION = runner_pb2.Speculation(method=runner_pb2.SPECULATION_METHOD_DRAFT_MODEL)


def test_texts_are_the_same_with_and_without_drafts(tmp_path: Path) -> None:
    """Greedy, drawn and masked, in steps with callers that do not speculate, before and after a crash.

    What other heads compute: tests/workers/test_mtp_head.py.
    """
    model = make_mtp_model(tmp_path, "qwen3_next")
    greedy, hot = types_pb2.SamplingParams(), types_pb2.SamplingParams(temperature=40, seed=3)
    mask = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=range(5, 9)))
    asked: dict[str, dict[str, Any]] = {
        "greedy": {"sampling": greedy},
        # Here the draws decide, which are those of the head: so drafts are accepted.
        "drawn": {"sampling": hot, "n": 2},
        "masked": {"sampling": hot, "constraint": runner_pb2.Constraint(mask=mask)},
    }
    prompt = [(5 * i + 2) % 97 for i in range(70)]
    plain = [item(each, prompt, 60, **settings) for each, settings in asked.items()]
    drafted = [
        item(f"{each} with drafts", prompt, 60, speculation=SPECULATION, **settings)
        for each, settings in asked.items()
    ]
    with GatewayProcess(model=str(model), workers=1, flags=FLAGS) as gateway:
        expected = {key: tokens(chunks) for key, chunks in execute(gateway, *plain).items()}
    with GatewayProcess(model=str(model), workers=1, flags=[*FLAGS, "--draft-model", MTP_HEAD]) as gateway:
        capabilities = gateway.capabilities().executor
        assert capabilities.draft_model == MTP_HEAD
        for is_killed in (False, True):
            if is_killed:
                (worker,) = gateway.status().workers
                os.kill(worker.pid, signal.SIGKILL)
            found = execute(gateway, *plain, *drafted)
            for (each, sample), expected_tokens in expected.items():
                assert tokens(found[each, sample]) == expected_tokens
                assert tokens(found[f"{each} with drafts", sample]) == expected_tokens
            usages = [found[each][-1].usage for each in found if "with drafts" in each[0]]
            accepted = sum(usage.accepted_draft_tokens for usage in usages)
            assert 0 < accepted < sum(usage.draft_tokens for usage in usages)
            (worker,) = gateway.status().workers
            assert worker.counts.accepted_draft_tokens == accepted
            assert worker.counts.draft_tokens == sum(usage.draft_tokens for usage in usages)
