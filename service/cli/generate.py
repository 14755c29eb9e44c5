"""`quire generate`: continues a prompt through the RPCs, and shows each token as it arrives.

This is also the smallest complete caller: tokens in, a Prefill, one Decode for each further token, a release.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc, types_pb2

from service.cli.channel import CONTROL_TIMEOUT_S, error_reason, open_channel, print_error
from service.cli.detokenizer import Detokenizer
from service.cli.prompt import BadPrompt, BadTokenizer, check_prompt, prompt_ids
from service.printable import stripped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How long a worker may take to load, and how often it is asked for.
WORKER_PATIENCE_S = 60.0
POLL_INTERVAL_S = 0.5
_Answer = TypeVar("_Answer")


def generate(options: argparse.Namespace) -> int:
    """Runs the command with the options of `service.cli.main`. Returns the exit status."""
    if hasattr(sys.stdout, "reconfigure"):  # a replaced stdout may be anything
        sys.stdout.reconfigure(errors="replace")
    with open_channel(options) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        try:
            check_prompt(options)
            info = _patiently(stub, lambda: _model_info(stub))
            able = stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=CONTROL_TIMEOUT_S)
            _generate(stub, info, able.executor.kv_capacity_tokens, options)
        except grpc.RpcError as error:
            print_error(error)
            return 1
        except BadTokenizer as error:
            print(f"quire: {error}", file=sys.stderr)
            return 1
        except BadPrompt as error:
            print(f"quire: {error}", file=sys.stderr)
            return 2
    return 0


def _patiently(stub: executor_pb2_grpc.ModelExecutorServiceStub, call: Callable[[], _Answer]) -> _Answer:
    """The answer of `call`, made again for a while as long as no worker is ready. Raises grpc.RpcError."""
    give_up_s = time.monotonic() + WORKER_PATIENCE_S
    told = ""
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error_reason(cast(grpc.Call, error)) != "NO_WORKER" or time.monotonic() > give_up_s:
                raise
        if (progress := _progress(stub)) != told:
            print(f"quire: waiting for a worker{progress}", file=sys.stderr)
            told = progress
        time.sleep(POLL_INTERVAL_S)


def _progress(stub: executor_pb2_grpc.ModelExecutorServiceStub) -> str:
    """How far the workers have loaded, as the end of a sentence."""
    # Not every token may ask.
    with contextlib.suppress(grpc.RpcError):
        workers = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=CONTROL_TIMEOUT_S).workers
        return f": loading {max((worker.load_progress for worker in workers), default=0):.0%}"
    return " to load"


def _model_info(stub: executor_pb2_grpc.ModelExecutorServiceStub) -> executor_pb2.GetModelInfoResponse:
    request = executor_pb2.GetModelInfoRequest(include_tokenizer=True, include_chat_template=True)
    return stub.GetModelInfo(request, timeout=CONTROL_TIMEOUT_S)


def _generate(
    stub: executor_pb2_grpc.ModelExecutorServiceStub,
    info: executor_pb2.GetModelInfoResponse,
    capacity_tokens: int,
    options: argparse.Namespace,
) -> None:
    tokenizer = _load_tokenizer(info)
    prompt = prompt_ids(tokenizer, info, options)
    wanted = types_pb2.OutputOptions(
        sampling=_sampling(info.sampling_defaults, options), logprob=options.logprobs
    )
    # The last token is never appended, so one more than a sequence can have can be shown.
    room = max(1, capacity_tokens - len(prompt) + 1)
    screen = _Screen(tokenizer, prompt, with_logprobs=options.logprobs)
    try:
        for output in _outputs(stub, prompt, wanted, min(options.max_tokens, room)):
            if output.token_id in info.model.eos_token_ids:
                break
            screen.show(output)
    finally:
        screen.finish()


def _outputs(
    stub: executor_pb2_grpc.ModelExecutorServiceStub,
    prompt: Sequence[int],
    wanted: types_pb2.OutputOptions,
    max_tokens: int,
) -> Iterator[types_pb2.StepOutput]:
    """Yields what each call says; the cache is released however the loop over it ends."""
    # The id makes a repeated request find the same cache; it also is in the server's log.
    request = executor_pb2.PrefillRequest(token_ids=prompt, output=wanted, request_id=uuid.uuid4().hex)
    prefilled = _patiently(stub, lambda: _prefill(stub, request))
    cache, output = prefilled.kv_cache, prefilled.output
    try:
        yield output
        for _ in range(max_tokens - 1):
            decode = executor_pb2.DecodeRequest(
                cache_id=cache.cache_id, token_id=output.token_id, position=cache.seq_len, output=wanted
            )
            decoded = stub.Decode(decode)
            cache, output = decoded.kv_cache, decoded.output
            yield output
    finally:
        _release(stub, cache.cache_id)


def _release(stub: executor_pb2_grpc.ModelExecutorServiceStub, cache_id: str) -> None:
    # A server that cannot be told has lost the cache, or will drop it when its lease runs out; what went
    # wrong before is what the user wants to know.
    with contextlib.suppress(grpc.RpcError):
        stub.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=cache_id), timeout=CONTROL_TIMEOUT_S)


def _prefill(
    stub: executor_pb2_grpc.ModelExecutorServiceStub, request: executor_pb2.PrefillRequest
) -> executor_pb2.PrefillResponse:
    """Prefill that Ctrl-C cancels: a cancelled prefill makes no cache, an abandoned one would."""
    call = stub.Prefill.future(request)
    try:
        return call.result()
    except KeyboardInterrupt:
        call.cancel()
        raise


class _Screen:
    """Shows tokens on standard output: text, ids where there is no tokenizer, or a line for each token."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], *, with_logprobs: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt) if tokenizer is not None else None
        self._with_logprobs = with_logprobs
        self._line_is_open = False

    def show(self, output: types_pb2.StepOutput) -> None:
        """Shows one token at once."""
        text = self._detokenizer.push(output.token_id) if self._detokenizer is not None else ""
        if self._with_logprobs:
            line = f"{output.token_id}\t{output.logprob:.4f}" + (f"\t{text!r}" if self._detokenizer else "")
            print(line, flush=True)
            return
        print(stripped(text) if self._detokenizer is not None else f"{output.token_id} ", end="", flush=True)
        self._line_is_open = True

    def finish(self) -> None:
        """Shows what was held back and ends the line."""
        if self._line_is_open:
            print(stripped(self._detokenizer.flush()) if self._detokenizer is not None else "", flush=True)


def _load_tokenizer(info: executor_pb2.GetModelInfoResponse) -> Tokenizer | None:
    """The tokenizer, None where there is none. Raises BadTokenizer."""
    if not info.tokenizer_json:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(info.tokenizer_json)
    except Exception as error:  # the library has no kind of its own
        raise BadTokenizer(error) from None


def _sampling(defaults: types_pb2.SamplingParams, options: argparse.Namespace) -> types_pb2.SamplingParams:
    """What the model's makers recommend but for what was given: the server checks the values."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(defaults)
    try:
        sampling.MergeFrom(types_pb2.SamplingParams(**given))
    except (ValueError, OverflowError):
        raise BadPrompt("--top-k and --seed must be whole numbers from 0") from None
    return sampling
