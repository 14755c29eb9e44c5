"""UploadWeights: checkpoints that arrive on a stream, each kept for as long as it is needed.

    weight-uploads/<id>/.../    safetensors files of the stream, and copies of the served model's other files

An upload is needed while a model version has it, the journal names it, a LoadWeights of it runs, or it is
the newest one and was neither served nor refused. All others are removed, those that a crash has left by
the next gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fnmatch
import functools
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from quire.v1 import admin_pb2

from service.completion import complete
from service.config import Config
from service.errors import InvalidArgument, LoadFailed, Loading, StorageUnavailable
from service.logging import get_logger
from service.pool.model_versions import ModelVersions
from service.uploads import Arriving, UploadDirectory, UploadedFile, require_room
from workers.common.trusted import make_private

_log = get_logger(__name__)
PREFIX = "upload:"
DIRECTORY = "weight-uploads"
_MODEL, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors|" + re.escape(_INDEX))
_MAX_FILES = 1025
# float32 in place of bfloat16.
_MOST_GROWTH = 2
# For headers, which grow with the number of files, and the index.
_MAX_NAMES_BYTES = 1 << 20
# Not copied from the served model: weights in any format, and whatever is larger than any tokenizer.
_WEIGHTS = ("*.safetensors*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")
_MAX_COPY_BYTES = 64 << 20
_TEMPLATES = "additional_chat_templates"
# Of sentence-transformers: how hidden states become an embedding.
_MODULES = "[0-9]_*/config.json"
# Workers name the model by the last parts of its path, up to three in the hub's cache. So its name stays.
_NAMING_PARTS = 3


class Upload(NamedTuple):
    """One that is written. `source`: of LoadWeights. `left_bytes`: the most that its files may have."""

    source: str
    directory: Path
    left_bytes: int


class WeightUploads:
    """Owner of the uploads."""

    def __init__(self, data_dir: Path | None, versions: ModelVersions, config: Config) -> None:
        """`data_dir`: None if nothing outlives the gateway."""
        self.directory = UploadDirectory(data_dir and data_dir.resolve(), DIRECTORY)
        self._versions = versions
        self._timeout_s = config.message_timeout_s
        self._is_receiving = False
        # The directories of complete uploads, by their ids.
        self._complete: dict[str, Path] = {}
        # The id of the one that waits for LoadWeights.
        self._waiting = ""
        # The sources of running LoadWeights, uploads or not, and of the upload that is being copied from.
        self._in_use: list[str] = []
        if data_dir is not None:
            in_use = {self._id_of(model): Path(model) for model in versions.models}
            self._complete = {upload_id: path for upload_id, path in in_use.items() if upload_id}
            self.directory.keep_only(self._complete)
        versions.subscribe(self._remove_unneeded)

    def find(self, source: str) -> Path | None:
        """The directory of an upload; None if the source names none."""
        return self._complete.get(source.removeprefix(PREFIX)) if source.startswith(PREFIX) else None

    @contextlib.contextmanager
    def loading(self, source: str) -> Iterator[None]:
        """Keeps an upload during a LoadWeights of it. It does not wait for another if it cannot be served."""
        with self._using(source):
            try:
                yield
            except LoadFailed:
                self.forget(source)
                raise

    def forget(self, source: str) -> None:
        """An upload does not wait for LoadWeights any more: it is removed unless it is used."""
        if source == PREFIX + self._waiting:
            self._waiting = ""
        self._remove_unneeded()

    @contextlib.contextmanager
    def _using(self, source: str) -> Iterator[None]:
        """Keeps an upload meanwhile."""
        self._in_use.append(source)
        try:
            yield
        finally:
            self._in_use.remove(source)
            self._remove_unneeded()

    async def receive(self, requests: AsyncIterator[admin_pb2.UploadWeightsRequest]) -> str:
        """Returns the source. See ModelRunnerService.UploadWeights. Raises QuireError, and leaves nothing."""
        async with self.writing() as upload:
            await self._receive_files(
                Arriving(requests, self._timeout_s), upload.directory, upload.left_bytes
            )
        return upload.source

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[Upload]:
        """An upload whose files the caller writes; at the end of the context it is complete.

        Raises QuireError, and leaves nothing; also after an exception of the caller.
        """
        if self._is_receiving:
            raise Loading
        upload_id = secrets.token_hex(8)
        served = Path(self._versions.serving.model)
        try:
            parent = self.directory.path / upload_id
        except OSError as error:
            raise StorageUnavailable(os.strerror(error.errno or errno.EIO)) from None
        self._is_receiving = True
        directory = parent.joinpath(*served.parts[1:][-_NAMING_PARTS:])
        try:
            # Other weights may be served before the copy is complete.
            with self._using(PREFIX + self._id_of(str(served))):
                left_bytes = await complete(asyncio.to_thread(_copy_settings, served, directory))
            yield Upload(PREFIX + upload_id, directory, left_bytes)
            await complete(asyncio.to_thread(self.directory.sync, upload_id))
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, parent, ignore_errors=True))
            if isinstance(error, OSError):
                raise StorageUnavailable(error.strerror) from None
            raise
        finally:
            self._is_receiving = False
        self._complete[upload_id], self._waiting = directory, upload_id
        self._remove_unneeded()
        _log.info("weights uploaded", upload=upload_id)

    async def _receive_files(
        self, arriving: Arriving[admin_pb2.UploadWeightsRequest], directory: Path, left_bytes: int
    ) -> None:
        """`left_bytes`: the most that all files may have."""
        names: set[str] = set()
        while (first := await arriving.next()) is not None:
            if _NAME.fullmatch(first.name) is None or first.name in names or len(names) >= _MAX_FILES:
                allowed = f"must be {_INDEX} or NAME.safetensors, of {_MAX_FILES} files at most, each once"
                raise _bad_weights("name", allowed)
            if not 0 < first.size_bytes <= left_bytes:
                raise _bad_weights("size_bytes", f"must be from 1 to {left_bytes}, what is left for files")
            names.add(first.name)
            left_bytes -= first.size_bytes
            await self._receive_file(first, arriving, directory / first.name)
        if not names & {_MODEL, _INDEX}:
            raise _bad_weights("name", f"there is neither {_MODEL} nor {_INDEX}")

    async def _receive_file(
        self,
        part: admin_pb2.UploadWeightsRequest,
        arriving: Arriving[admin_pb2.UploadWeightsRequest],
        path: Path,
    ) -> None:
        """`part`: the first one."""
        digest = hashlib.sha256()
        with await complete(asyncio.to_thread(_open, path, part.size_bytes)) as file:
            while True:
                await complete(asyncio.to_thread(_write, file, digest, part.data))
                if part.sha256:
                    break
                following = await arriving.next()
                if following is None or following.name:
                    raise _bad_weights("sha256", f"the last part of {path.name} has none")
                if not following.data and not following.sha256:
                    raise _bad_weights("data", f"a part of {path.name} is empty")
                part = following
            if file.left_bytes or digest.digest() != part.sha256:
                raise _bad_weights("sha256", f"{path.name} has other contents, or another size")

    def _remove_unneeded(self) -> None:
        if not self._complete:
            return
        if self._id_of(self._versions.serving.model) == self._waiting:
            self._waiting = ""
        needed = {self._waiting, *(source.removeprefix(PREFIX) for source in self._in_use)}
        needed.update(map(self._id_of, self._versions.models))
        for upload_id in self._complete.keys() - needed:
            del self._complete[upload_id]
            path = self.directory.path / upload_id
            remove = functools.partial(shutil.rmtree, path, ignore_errors=True)
            asyncio.get_running_loop().run_in_executor(None, remove)

    def _id_of(self, model: str) -> str:
        """The id of the upload that is served as this model. Empty if it is another directory."""
        try:
            return Path(model).resolve().relative_to(self.directory.path).parts[0]
        # OSError: of a relative path, which no upload has, once the current directory is gone.
        except (ValueError, IndexError, OSError):
            return ""


def _copy_settings(served: Path, directory: Path) -> int:
    """Copies what a model has besides weights. Returns how many bytes new weights may have. Raises OSError.

    Raises LoadFailed if the served model has no directory any more, or none at all.
    """
    if not (served / "config.json").is_file():
        raise LoadFailed("the files of the served model cannot be read")
    make_private(directory)
    for file in (*served.iterdir(), *(served / _TEMPLATES).glob("*"), *served.glob(_MODULES)):
        is_weights = any(fnmatch.fnmatch(file.name, pattern) for pattern in _WEIGHTS)
        if not is_weights and file.is_file() and file.stat().st_size <= _MAX_COPY_BYTES:
            copy = directory / file.relative_to(served)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    served_bytes = sum(file.stat().st_size for file in served.glob("*.safetensors"))
    return _MOST_GROWTH * served_bytes + _MAX_NAMES_BYTES


def _open(path: Path, size_bytes: int) -> UploadedFile:
    """Raises OSError, also if the disk is too full for the whole file."""
    require_room(path.parent, size_bytes)
    return UploadedFile(path, size_bytes, functools.partial(_bad_weights, "data"))


def _write(file: UploadedFile, digest: hashlib._Hash, part: bytes) -> None:
    file.write(part)
    digest.update(part)


def _bad_weights(field: str, why: str) -> InvalidArgument:
    return InvalidArgument("BAD_WEIGHTS", field, why)
