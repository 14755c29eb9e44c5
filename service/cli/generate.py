"""`quire generate`: continues a prompt through Execute, and shows what comes as it comes.

The tokens of the prompt are made here, with the model's tokenizer and template as the server hands them out;
the text of what follows is the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from google.rpc import status_pb2
from quire.v1 import executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc, types_pb2

from service.cli.channel import (
    CONTROL_TIMEOUT_S,
    connected,
    error_reason,
    print_error,
    print_status,
    status_reason,
)
from service.cli.prompt import BadPrompt, BadTokenizer, check_prompt, prompt_ids
from service.printable import stripped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How long a worker may take to load, and how often it is asked for.
WORKER_PATIENCE_S = 60.0
POLL_INTERVAL_S = 0.5
NO_WORKER = "NO_WORKER"
_Answer = TypeVar("_Answer")


def generate(options: argparse.Namespace) -> int:
    """Runs the command with the options of `service.cli.main`. Returns the exit status."""
    if hasattr(sys.stdout, "reconfigure"):  # a replaced stdout may be anything
        sys.stdout.reconfigure(errors="replace")
    if options.prompt == "-":
        # As `$(...)` of a shell: without the newline at the end.
        options.prompt = sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")
    with connected(options) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        try:
            check_prompt(options)
            _generate(channel, _patiently(channel, lambda: _model_info(stub)), options)
        except grpc.RpcError as error:
            print_error(error)
            return 1
        except _Failed as error:
            print_status(error.status)
            return 1
        except BadTokenizer as error:
            print(f"quire: {error}", file=sys.stderr)
            return 1
        except BadPrompt as error:
            print(f"quire: {error}", file=sys.stderr)
            return 2
    return 0


def _patiently(channel: grpc.Channel, call: Callable[[], _Answer]) -> _Answer:
    """The answer of `call`, made again for a while as long as no worker is ready. Raises what it raises."""
    give_up_s = time.monotonic() + WORKER_PATIENCE_S
    told = ""
    while True:
        try:
            return call()
        except (grpc.RpcError, _Failed) as error:
            if _reason(error) != NO_WORKER or time.monotonic() > give_up_s:
                raise
        if (progress := _progress(channel)) != told:
            print(f"quire: waiting for a worker{progress}", file=sys.stderr)
            told = progress
        time.sleep(POLL_INTERVAL_S)


def _reason(error: grpc.RpcError | _Failed) -> str:
    return status_reason(error.status) if isinstance(error, _Failed) else error_reason(cast(grpc.Call, error))


def _progress(channel: grpc.Channel) -> str:
    """How far the workers have loaded, as the end of a sentence."""
    stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    # Not every token may ask.
    with contextlib.suppress(grpc.RpcError):
        workers = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=CONTROL_TIMEOUT_S).workers
        return f": loading {max((worker.load_progress for worker in workers), default=0):.0%}"
    return " to load"


def _model_info(stub: executor_pb2_grpc.ModelExecutorServiceStub) -> executor_pb2.GetModelInfoResponse:
    request = executor_pb2.GetModelInfoRequest(include_tokenizer=True, include_chat_template=True)
    return stub.GetModelInfo(request, timeout=CONTROL_TIMEOUT_S)


def _generate(
    channel: grpc.Channel, info: executor_pb2.GetModelInfoResponse, options: argparse.Namespace
) -> None:
    tokenizer = _load_tokenizer(info)
    item = runner_pb2.ExecuteItem(
        item_id="prompt",
        tokens=runner_pb2.TokenPrompt(token_ids=prompt_ids(tokenizer, info, options)),
        sampling=_sampling(info.sampling_defaults, options),
        max_tokens=options.max_tokens,
        logprobs=options.logprobs,
    )
    # The id is in the server's log, too.
    request = runner_pb2.ExecuteRequest(items=[item], request_id=uuid.uuid4().hex)
    screen = _Screen(info.model.eos_token_ids, has_text=tokenizer is not None, with_logprobs=options.logprobs)
    try:
        for chunk in _chunks(channel, request):
            screen.show(chunk)
    finally:
        screen.finish()


def _chunks(channel: grpc.Channel, request: runner_pb2.ExecuteRequest) -> Iterator[runner_pb2.SampleChunk]:
    """What comes of a request; it is cancelled however the loop over it ends. Raises RpcError, _Failed."""
    stub = runner_pb2_grpc.ModelRunnerServiceStub(channel)
    call, first = _patiently(channel, lambda: _begun(stub, request))
    try:
        for response in itertools.chain([first], call):
            for chunk in response.chunks:
                if chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR:
                    raise _Failed(chunk.error)
                yield chunk
    finally:
        # Nothing happens to one that has ended.
        call.cancel()


def _begun(
    stub: runner_pb2_grpc.ModelRunnerServiceStub, request: runner_pb2.ExecuteRequest
) -> tuple[Any, runner_pb2.ExecuteResponse]:
    """A call, and its first message with chunks. Raises grpc.RpcError; _Failed where there is no worker."""
    call = stub.Execute(request)
    first = next((message for message in call if message.chunks), runner_pb2.ExecuteResponse())
    for chunk in first.chunks:
        if status_reason(chunk.error) == NO_WORKER:
            call.cancel()
            raise _Failed(chunk.error)
    return call, first


class _Failed(Exception):
    """What was asked for has failed, and nothing else of the call: there was nothing else."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class _Screen:
    """Shows what comes on standard output: text, ids where there is none, or a line for each token."""

    def __init__(self, end_ids: Collection[int], *, has_text: bool, with_logprobs: bool) -> None:
        self._end_ids = end_ids
        self._has_text = has_text
        self._with_logprobs = with_logprobs
        self._line_is_open = False

    def show(self, chunk: runner_pb2.SampleChunk) -> None:
        """Shows what has come, at once."""
        token_ids = list(chunk.token_ids)
        if chunk.finish_reason and token_ids and token_ids[-1] in self._end_ids:
            # It only says that this is the end.
            token_ids.pop()
        if self._with_logprobs:
            self._show_lines(token_ids, chunk)
            return
        shown = stripped(chunk.text) if self._has_text else "".join(f"{token_id} " for token_id in token_ids)
        print(shown, end="", flush=True)
        self._line_is_open = self._line_is_open or bool(token_ids or shown)

    def _show_lines(self, token_ids: Sequence[int], chunk: runner_pb2.SampleChunk) -> None:
        """The text of several tokens is shown with the last of them."""
        for index, (token_id, told) in enumerate(zip(token_ids, chunk.logprobs, strict=False), start=1):
            text = chunk.text if index == len(token_ids) else ""
            print(f"{token_id}\t{told.logprob:.4f}" + (f"\t{text!r}" if self._has_text else ""), flush=True)

    def finish(self) -> None:
        """Ends the line."""
        if self._line_is_open:
            print(flush=True)


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
