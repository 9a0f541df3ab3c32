"""Several servers of one database and one data directory, and a client of all of them."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, Self

import httpx
import sqlalchemy as sa

from langchain_art_server.storage.schema import connect
from tests.support.live_server import ForkedServer
from tests.support.postgres import Postgres
from tests.support.storms import PATIENCE, Persistent


class Gateway(ForkedServer):
    """One server of a fleet."""

    def __init__(
        self, folder: Path, number: int, data_dir: Path, *args: str, env: dict[str, str]
    ) -> None:
        super().__init__(data_dir, *args, env=env, module="tests.support.fleet_server")
        self.log = folder / f"gateway-{number}.log"

    @property
    def is_stopped(self) -> bool:
        """Whether the process has stopped itself, or was stopped."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


class Gateways:
    """A fleet of two servers; one that is killed is the test's to start again."""

    def __init__(
        self, folder: Path, postgres: Postgres, settings: str = "", api_key: str | None = None
    ) -> None:
        self.folder, self.url = folder, postgres.database()
        self.stop_file = folder / "stop"
        env = {"STOP_FILE": str(self.stop_file)} | ({"ART_API_KEY": api_key} if api_key else {})
        (folder / "fleet.toml").write_text(f"fleet = true\n{settings}")
        args = ("--config", str(folder / "fleet.toml"), "--database-url", self.url)
        self.all = [Gateway(folder, number, folder / "data", *args, env=env) for number in range(2)]

    def __enter__(self) -> Self:
        for one in self.all:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.all:
            if one.process is not None and one.process.poll() is None:
                one.thaw()
                one.stop()

    def rows(self, query: str, **values: Any) -> list[Any]:
        """What the database says."""
        engine = connect(self.url)
        with engine.connect() as connection:
            found = list(connection.execute(sa.text(query), values))
        engine.dispose()
        return found


class AnyGateway(Persistent):
    """Sends each request to one server, and to the next until one answers otherwise than 503."""

    def __init__(self, fleet: Gateways, first: int = 0) -> None:
        self._roots = [one.root for one in fleet.all]
        #: The server that is asked.
        self.at = first % len(self._roots)
        headers = {"Authorization": f"Bearer {fleet.all[0].api_key}"}
        self._http = httpx.Client(headers=headers, timeout=30)
        self.resent = 0
        #: When the request that was answered last was sent.
        self.sent = 0.0

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE
        self.at = (self.at + 1) % len(self._roots)
        while True:
            with contextlib.suppress(httpx.TransportError):
                url, self.sent = self._roots[self.at] + path, time.time()
                answer = self._http.request(method, url, json=body, headers=headers)
                if answer.status_code != 503:
                    return answer
            self.resent += 1
            assert time.monotonic() < deadline, f"{method} {path} is not answered"
            self.at = (self.at + 1) % len(self._roots)
            time.sleep(0.02)
