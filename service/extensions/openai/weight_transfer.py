"""vLLM's calls to receive weights that a trainer broadcasts: /update_weights and related ones.

Also prime-rl's form of /update_weights, which names a directory whose files are copied.

A process joins the trainer's group, and writes the tensors it receives as the files of an upload. With
/finish_weight_update these become the served weights, as by LoadWeights. So nothing changes before that, even
if the trainer fails; and all workers, including those that start later, load them from a directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from quire.v1 import admin_pb2
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from service.admin import AdminApi
from service.completion import complete
from service.errors import InvalidArgument, LoadFailed, Loading, SeveralGateways, StorageUnavailable
from service.extensions.openai.bodies import BodyReader
from service.extensions.openai.fields import Fields, bad_field, string, unsupported
from service.extensions.openai.generation import until_disconnected
from service.extensions.openai.middleware import Access, GuardedRoute
from service.extensions.openai.receiving_process import ReceivingProcess
from service.extensions.openai.transfer_fields import Announced, group_of, tensors_of
from service.logging import get_logger
from service.runtimes.weight_uploads import Upload
from service.uploads import UploadedFile, require_room

_log = get_logger(__name__)
NONE, FILESYSTEM = "none", "filesystem"
_INDEX = "model.safetensors.index.json"
# The time for the process to import torch.
_START_TIMEOUT_S = 120.0
# What happens to caches when weights are replaced, by vLLM's mode of the pause. "": no pause.
_PREVIOUS_CACHES = {
    "": admin_pb2.PREVIOUS_CACHES_KEEP_KV,
    "keep": admin_pb2.PREVIOUS_CACHES_KEEP_KV,
    "abort": admin_pb2.PREVIOUS_CACHES_END,
}


class WeightTransfer:
    """Owner of the process and of the upload that it writes. One call runs at a time."""

    def __init__(self, admin: AdminApi, backend: str, timeout_s: float) -> None:
        """`timeout_s`: the longest time without a call or tensor from the trainer."""
        self._admin = admin
        self._backend = backend
        self._timeout_s = timeout_s
        self._process: ReceivingProcess | None = None
        self._upload: Upload | None = None
        # A complete upload that is not served yet, because another LoadWeights ran.
        self._received: Upload | None = None
        self._closing = contextlib.AsyncExitStack()
        # The file of each tensor of the upload.
        self._files: dict[str, str] = {}
        self._left_bytes = 0
        # The tensors that the last /update_weights announced. The next call may omit the same ones.
        self._announced: Sequence[Announced] = ()
        self._pause = ""
        # The version of the last weights that were served from here, and the trainer's name for it.
        self._labelled: tuple[int, str] | None = None
        self._is_busy = False
        self._idle: asyncio.TimerHandle | None = None
        self._abandoning: asyncio.Task[None] | None = None

    def routes(self, bodies: BodyReader) -> list[GuardedRoute]:
        """Returns a route for each call."""
        calls: dict[str, Callable[[Fields], Awaitable[dict[str, Any]]]] = {
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shut_down,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/init_broadcaster": _refuse_broadcaster,
            "/pause": self._pause_until_resumed,
            "/resume": self._resume,
        }
        route = functools.partial(GuardedRoute, access=Access.LOAD_WEIGHTS)
        return [
            *(route(path, OperatorCall(call, bodies), methods=["POST"]) for path, call in calls.items()),
            route("/is_paused", lambda _: JSONResponse({"is_paused": bool(self._pause)})),
            # A single process receives for all workers.
            route("/get_world_size", lambda _: JSONResponse({"world_size": 1})),
            route("/weight_info", lambda _: JSONResponse({"weight_version": self._label})),
        ]

    async def close(self) -> None:
        """Ends the process, and drops the tensors that it has received."""
        self._watch(None)
        await self._drop()
        await self._end()

    # Pauses. They stop nothing: weights are replaced between two steps.

    async def _pause_until_resumed(self, fields: Fields) -> dict[str, Any]:
        mode = fields.get("mode", string) or "abort"
        fields.refuse_others({"clear_cache"})
        if mode not in _PREVIOUS_CACHES:
            raise bad_field("mode", "must be abort or keep: requests are not waited for")
        self._pause = mode
        return {"status": "paused"}

    async def _resume(self, fields: Fields) -> dict[str, Any]:
        fields.refuse_others()
        self._pause = ""
        return {"status": "resumed"}

    # The group.

    async def _init(self, fields: Fields) -> dict[str, Any]:
        if self._backend == FILESYSTEM:
            raise LoadFailed("this server's openai_weight_transfer takes weights from directories only")
        info = group_of(Fields(fields.raw("init_info"), "init_info"), self._backend)
        fields.refuse_others()
        self._check_only_gateway()
        async with self._alone():
            await self._drop()
            await self._end()
            self._announced = ()
            self._process = await ReceivingProcess.start()
            join = {**info, "timeout_s": self._timeout_s}
            await self._process.told({"join": join}, "joined", self._timeout_s, _START_TIMEOUT_S)
        return {"message": "Weight transfer initialized"}

    async def _shut_down(self, fields: Fields) -> dict[str, Any]:
        fields.refuse_others()
        async with self._alone():
            await self._drop()
            await self._end()
        return {"message": "Weight transfer shut down"}

    def _check_only_gateway(self) -> None:
        if self._admin.state.has_other_gateways:
            raise SeveralGateways

    # An update.

    async def _start(self, fields: Fields) -> dict[str, Any]:
        fields.refuse_others()
        async with self._alone():
            self._running()
            await self._drop()
            self._upload = await self._closing.enter_async_context(self._admin.uploads.writing())
            self._files, self._left_bytes = {}, self._upload.left_bytes
        return {"message": "Weight update started"}

    async def _update(self, fields: Fields) -> dict[str, Any]:
        if (directory := fields.get("weight_dir", string)) is not None:
            fields.refuse_others()
            return await self._update_from(Path(directory))
        given = Fields(fields.raw("update_info"), "update_info")
        async with self._alone():
            process = self._running()
            if self._upload is None:
                raise LoadFailed("/start_weight_update comes before /update_weights")
            fields.refuse_others()
            # In a thread: there may be a hundred thousand tensors.
            known = self._announced, self._files, self._left_bytes
            tensors, left_bytes = await asyncio.to_thread(tensors_of, given, *known)
            await _require_room(self._upload.directory, self._left_bytes - left_bytes)
            self._left_bytes = left_bytes
            name = f"{len(set(self._files.values()))}.safetensors"
            self._files |= dict.fromkeys((tensor for tensor, _, _ in tensors), name)
            path = str(self._upload.directory / name)
            receive = {"path": path, "tensors": tensors}
            await process.told({"receive": receive}, "written", self._timeout_s)
            self._announced = tensors
        return {"message": "Weights updated"}

    async def _finish(self, fields: Fields) -> dict[str, Any]:
        label = fields.get("weight_version", string)
        fields.refuse_others()
        async with self._alone():
            upload, self._upload = self._upload, None
            if upload is not None and self._files:
                async with self._closing:
                    await complete(asyncio.to_thread(_write_index, upload.directory / _INDEX, self._files))
                self._received = upload
            if self._received is None:
                raise LoadFailed("no weights were received since /start_weight_update")
            served = await self._serve(self._received)
            self._received = None
        self._labelled = served.weights_version, label or str(served.weights_version)
        return {
            "message": "Weight update finished",
            "weights_version": served.weights_version,
            "fingerprint": served.fingerprint,
        }

    async def _update_from(self, directory: Path) -> dict[str, Any]:
        """Loads weights from a trainer's directory. The files are copied, because it removes them later."""
        if not directory.is_absolute():
            raise bad_field("weight_dir", "must be an absolute path of the server's machine")
        self._check_only_gateway()
        async with self._alone():
            async with self._admin.uploads.writing() as upload:
                await complete(asyncio.to_thread(_copy_weights, directory, upload))
            served = await self._serve(upload)
        self._labelled = served.weights_version, str(served.weights_version)
        return {"message": "Weights updated", "weights_version": served.weights_version}

    async def _serve(self, upload: Upload) -> admin_pb2.LoadWeightsResponse:
        progress: list[admin_pb2.LoadWeightsResponse] = []

        async def write(message: admin_pb2.LoadWeightsResponse) -> None:
            progress.append(message)

        request = admin_pb2.LoadWeightsRequest(
            source=upload.source, previous_caches=_PREVIOUS_CACHES[self._pause]
        )
        # The only part of a gRPC context that LoadWeights needs.
        await self._admin.LoadWeights(request, cast("Any", SimpleNamespace(write=write)))
        return progress[-1]

    @property
    def _label(self) -> str | None:
        """The served weights' name: the trainer's, or their version if loaded otherwise. None: none yet."""
        if self._labelled is None:
            return None
        version, label = self._labelled
        served = self._admin.state.model_version
        return label if served == version else str(served)

    # The process.

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Runs one call. Raises Loading during another call. If the call fails, the update is dropped."""
        if self._is_busy:
            raise Loading
        self._is_busy = True
        self._watch(None)
        try:
            yield
        except Loading:
            # Another upload or load is running, so this update stays.
            raise
        except BaseException:
            # The trainer and the process may be at different tensors. Its broadcasts fail now as well.
            await complete(self.close())
            raise
        finally:
            self._is_busy = False
            if self._upload is not None or self._received is not None:
                self._watch(self._timeout_s)

    def _watch(self, timeout_s: float | None) -> None:
        """Restarts the timer that drops the update if no further call comes. None: stops it."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if timeout_s is not None:
            self._idle = asyncio.get_running_loop().call_later(timeout_s, self._abandon)

    def _abandon(self) -> None:
        _log.warning("the trainer does not finish its update of the weights", waited_s=self._timeout_s)
        self._abandoning = asyncio.create_task(self._drop())

    async def _drop(self) -> None:
        """Drops everything received since /start_weight_update."""
        if self._received is not None:
            self._admin.uploads.forget(self._received.source)
        self._upload = self._received = None
        dropped = asyncio.CancelledError()
        closing, self._closing = self._closing, contextlib.AsyncExitStack()
        await closing.__aexit__(type(dropped), dropped, None)

    def _running(self) -> ReceivingProcess:
        if self._process is None or not self._process.is_running:
            raise LoadFailed("there is no group of a trainer: /init_weight_transfer_engine comes first")
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


async def _require_room(directory: Path, size_bytes: int) -> None:
    """Raises StorageUnavailable if the disk would get too full: the writing process cannot know the limit."""
    try:
        await asyncio.to_thread(require_room, directory, size_bytes)
    except OSError as error:
        raise StorageUnavailable(error.strerror) from None


async def _refuse_broadcaster(fields: Fields) -> NoReturn:
    text = "what prime-rl broadcasts are pickles: let its trainer write files (weight_broadcast.type)"
    raise unsupported(fields.path("host"), text)


def _copy_weights(directory: Path, upload: Upload) -> None:
    """Copies the weight files. Raises InvalidArgument if there are none or too many, and OSError."""
    names: list[str] = []
    # ValueError: the path contains a NUL.
    with contextlib.suppress(OSError, ValueError):
        names = [file.name for file in directory.iterdir()]
    names = [name for name in names if name.endswith(".safetensors") or name == _INDEX]
    if not names:
        raise InvalidArgument("BAD_SOURCE", "weight_dir", "there are no safetensors files")
    refusal = functools.partial(InvalidArgument, "BAD_WEIGHTS", "weight_dir")
    left_bytes = upload.left_bytes
    for name in names:
        with UploadedFile(upload.directory / name, left_bytes, refusal) as copy:
            copy.copy(directory / name)
            left_bytes = copy.left_bytes


def _write_index(path: Path, files: Mapping[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")


class OperatorCall:
    """The ASGI application that answers a query and an optional JSON body with a JSON value."""

    def __init__(self, call: Callable[[Fields], Awaitable[dict[str, Any]]], bodies: BodyReader) -> None:
        self._call, self._bodies = call, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request. Raises QuireError. Ends if the client, a trainer, disconnects."""
        request = Request(scope, receive)
        if "origin" in request.headers:
            # Browsers let pages of other origins send requests without a body.
            raise InvalidArgument("BAD_CONTENT_TYPE", "", "pages cannot call this")

        async def respond(value: object) -> None:
            fields = Fields({**request.query_params, **value} if isinstance(value, dict) else value)
            await JSONResponse(await self._call(fields))(scope, receive, send)

        if "content-type" not in request.headers:
            await until_disconnected(receive, respond({}))
            return
        async with self._bodies.read(request) as (value, _):
            await until_disconnected(receive, respond(value))
