"""Certificates made on the fly, with the openssl command. For tests only."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_DAYS = ("-days", "2")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    cert: Path
    key: Path


class Authority:
    """A CA in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl command")
        directory.mkdir()
        self._directory = directory
        self._ca = Pair(directory / "ca.crt", directory / "ca.key")
        self._openssl("req", "-x509", *_KEY, *_DAYS, "-subj", "/CN=test CA", *self._files(self._ca))

    @property
    def cert(self) -> Path:
        """What those trust who trust this CA."""
        return self._ca.cert

    def issue(self, common_name: str, alternative_names: str = "") -> Pair:
        """A certificate, for example for `DNS:localhost,IP:127.0.0.1`."""
        name = common_name or "unnamed"
        pair = Pair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        request, extensions = self._directory / "request", self._directory / "extensions"
        subject = f"/CN={common_name}" if common_name else "/O=nobody"
        self._openssl("req", *_KEY, "-subj", subject, "-keyout", str(pair.key), "-out", str(request))
        names = f"subjectAltName={alternative_names}\n" if alternative_names else ""
        extensions.write_text(f"basicConstraints=CA:FALSE\n{names}")
        signer = ("-CA", str(self._ca.cert), "-CAkey", str(self._ca.key), "-CAcreateserial")
        files = ("-in", str(request), "-out", str(pair.cert), "-extfile", str(extensions))
        self._openssl("x509", "-req", *_DAYS, *signer, *files)
        return pair

    def server(self) -> Pair:
        """A certificate for servers on this machine."""
        return self.issue("server", "DNS:localhost,IP:127.0.0.1")

    @staticmethod
    def _files(pair: Pair) -> tuple[str, ...]:
        return "-keyout", str(pair.key), "-out", str(pair.cert)

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
