"""A real S3 server on loopback with one bucket: moto's, in an environment of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import obstore
from obstore.store import S3Store

from tests.support.environments import environment
from tests.support.live_server import TLS, free_port

BUCKET = "adapters"


class S3Server:
    """Serves while its scope lasts; what it holds is in its memory."""

    def __init__(self, folder: Path, *, requests_without_rights: int | None = None) -> None:
        """After some requests it may refuse all keys but those that its IAM has made: none."""
        python = environment("moto", ["moto[s3,server]>=5.2,<6"])
        self._log = folder / "moto.log"
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._argv = [str(python), "-m", "moto.server", "--port", str(self.port)]
        self._env = {name: one for name, one in os.environ.items() if name != "PYTHONPATH"}
        if requests_without_rights is not None:
            self._env["INITIAL_NO_AUTH_ACTION_COUNT"] = str(requests_without_rights)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients find it."""
        return {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    @staticmethod
    def url(prefix: str) -> str:
        """A place of its own."""
        return f"s3://{BUCKET}/{prefix}"

    def objects(self, prefix: str) -> dict[str, bytes]:
        """All objects below a prefix, by their names after it."""
        store = self._store(prefix)
        names = [one["path"] for one in obstore.list(store).collect()]
        return {name: bytes(obstore.get(store, name).bytes()) for name in names}

    def put(self, prefix: str, name: str, content: bytes) -> None:
        obstore.put(self._store(prefix), name, content)

    def delete(self, prefix: str, name: str) -> None:
        obstore.delete(self._store(prefix), name)

    def _store(self, prefix: str) -> Any:
        return S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=self.endpoint,
            access_key_id="tests",
            secret_access_key="tests",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def answered(self, method: str, prefix: str, name: str) -> int:
        """How many requests for an object below a prefix it has answered."""
        lines = self._log.read_text().splitlines()
        asked = [line for line in lines if f"{method} /{BUCKET}/{prefix}/" in line]
        return sum(line.partition("HTTP/1.1")[0].rstrip().endswith(name) for line in asked)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It accepts connections, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._env)
        until = time.monotonic() + 60
        while True:
            assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()
            try:
                made = httpx.put(f"{self.endpoint}/{BUCKET}", verify=TLS)
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                assert made.status_code == 200, made.text
                return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
