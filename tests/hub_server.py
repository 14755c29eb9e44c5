"""A Hugging Face hub in this process, of a few files, which can be made to fail."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


@dataclass
class Hub:
    """One model at one commit, which `main` names.

    Attributes:
        model: Its id.
        files: Their contents by name.
        refusal: Whatever is asked is answered with this status, and this X-Error-Code.
        break_after: Transfers of a file break after so many bytes, as often as `breaks` says.
        requests: Methods and paths, in order.
        authorizations: What requests said of who makes them.
    """

    model: str
    files: Mapping[str, bytes]
    refusal: tuple[int, str] | None = None
    break_after: int = 1000
    breaks: int = 0
    requests: list[str] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose contents were asked for."""
        found = (re.search(r"^GET /.*/resolve/[^/]+/(.*)", request) for request in self.requests)
        return [match[1] for match in found if match is not None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._serve(with_content=True)

    def do_HEAD(self) -> None:
        self._serve(with_content=False)

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self, *, with_content: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        hub.authorizations.add(self.headers.get("authorization", ""))
        if hub.refusal is not None:
            return self._answer(
                hub.refusal[0], b"{}", {"X-Error-Code": hub.refusal[1]} if hub.refusal[1] else {}
            )
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or tree or file
        if found is None or found[1] != hub.model:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if found[2] not in (None, "main", COMMIT):
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if api is not None or tree is not None:
            found_there = self._listing() if tree is None else self._tree()
            return self._answer(200, json.dumps(found_there).encode(), {})
        if found[3] not in hub.files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(hub.files[found[3]], with_content=with_content)

    def _listing(self) -> Any:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.files.items()]
        return {"id": self.hub.model, "sha": COMMIT, "siblings": siblings}

    def _tree(self) -> Any:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.hub.files.items()
        ]

    def _file(self, content: bytes, *, with_content: bool) -> None:
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        begin = int(wanted[1]) if wanted is not None else 0
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        part = content[begin:]
        breaks = with_content and self.hub.breaks > 0 and len(part) > self.hub.break_after
        if breaks:
            self.hub.breaks -= 1
        self._answer(206 if begin else 200, part, headers, sent=self.hub.break_after if breaks else len(part))

    def _answer(self, status: int, content: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        """Sends `sent` bytes of a content, and hangs up if that is not all."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])
        if sent is not None and sent < len(content):
            self.close_connection = True


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serves a hub on a free port. Yields its address, for HF_ENDPOINT."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def cached(cache: Path, name: str, directory: Path) -> Path:
    """Moves the files of a directory into a local cache of the hub, as of a model with a name.

    Returns the directory of the snapshot, where files are links to blobs.
    """
    home = cache / f"models--{name.replace('/', '--')}"
    blobs, snapshot = home / "blobs", home / "snapshots" / COMMIT
    for made in (blobs, snapshot, home / "refs"):
        made.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(directory.iterdir())):
        blob = file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
