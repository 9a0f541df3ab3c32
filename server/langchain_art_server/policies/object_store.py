"""Objects of a bucket (S3, GCS, Azure) or of a folder, by obstore: each request has a bound.

Credentials are found where the store's own programs find them: environment variables, and what a
cloud gives its machines.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from langchain_art.errors import ConfigError, EngineUnavailable

#: Seconds for a request, whole with its part of a file; for making a connection; and after which
#: what has failed is not tried again.
REQUEST_SECONDS, CONNECT_SECONDS, RETRY_SECONDS = 15, 3, 10
_RETRIES = 3
#: Bytes of a file that one request carries, and how many of them run at once.
_PART, _AT_ONCE = 8 << 20, 4
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REFUSED = (PermissionDeniedError, UnauthenticatedError)


class ObjectStore:
    """The objects below a URL; their names are relative to it.

    Args:
        url: such as ``s3://bucket/prefix``.

    Raises:
        ConfigError: the URL says too little, such as Azure's without an account.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        client = {
            "allow_http": True,  # where AWS_ENDPOINT_URL, or its like, says http
            "timeout": f"{REQUEST_SECONDS}s",
            "connect_timeout": f"{CONNECT_SECONDS}s",
        }
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
        try:
            self._store = from_url(url, client_options=client, retry_config=retry)  # type: ignore[arg-type]
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"got adapters_url={url!r}, which cannot be used: {_in_words(error)}"
            ) from error

    def require(self) -> None:
        """See that objects can be written, created once, read, listed and deleted.

        Raises:
            ConfigError: they cannot; says why.
        """
        probe = f".probe/{uuid.uuid4().hex}"
        try:
            self.create(probe, b"1")
            again = self.create(probe, b"2")
            kept, listed = self.read(probe), probe in self.list(".probe")
            self.delete([probe])
        except EngineUnavailable as error:
            raise ConfigError(
                f"got adapters_url={self.url!r}, and it cannot be used: "
                f"{_in_words(error.__cause__ or error)}. Expected a bucket that is there, and "
                "credentials for it in the environment (of S3: AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, or the machine's own role)"
            ) from error
        if again or kept != b"1" or not listed:
            raise ConfigError(
                f"got adapters_url={self.url!r}, a store that writes over an object which exists "
                "where it is told not to (If-None-Match: *), or that does not list what was "
                "written; expected one with conditional writes and consistent lists, as S3, GCS "
                "and Azure have"
            )

    def put(self, name: str, file: Path) -> None:
        """Write a file as an object, over an earlier one. Raises EngineUnavailable."""
        with self._answering():
            obstore.put(self._store, name, file, chunk_size=_PART, max_concurrency=_AT_ONCE)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; whether it was written. Raises EngineUnavailable.

        A request that is tried again may find what its first try has written.
        """
        with self._answering():
            try:
                obstore.put(self._store, name, content, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def read(self, name: str) -> bytes | None:
        """A small object; None: there is none. Raises EngineUnavailable."""
        with self._answering():
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def download(self, name: str, file: Path) -> None:
        """Read an object into a new file. Raises EngineUnavailable, FileNotFoundError."""
        with self._answering(missing=True):
            size = obstore.head(self._store, name)["size"]
            with file.open("xb") as target, ThreadPoolExecutor(_AT_ONCE) as threads:
                target.truncate(size)

                def fetch(start: int) -> None:
                    length = min(_PART, size - start)
                    part = obstore.get_range(self._store, name, start=start, length=length)
                    with file.open("r+b") as own:
                        own.seek(start)
                        own.write(part)

                for _ in threads.map(fetch, range(0, size, _PART)):
                    pass

    def list(self, below: str) -> dict[str, datetime]:
        """Names of the objects in a folder and below it, with when each was written.

        Raises EngineUnavailable.
        """
        with self._answering():
            found = obstore.list(self._store, below or None)
            return {one["path"]: one["last_modified"] for part in found for one in part}

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects that are there, in this order. Raises EngineUnavailable."""
        for name in names:
            with self._answering(), suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    @contextmanager
    def _answering(self, *, missing: bool = False) -> Generator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            if missing and isinstance(error, FileNotFoundError):
                raise
            does = "refuses" if isinstance(error, _REFUSED) else "does not do"
            raise EngineUnavailable(
                f"The object store {self.url} {does} what it was asked: {_in_words(error)}. Send "
                "the request again.",
                retry_after=5,
            ) from error


def _in_words(error: BaseException) -> str:
    """Error of obstore: its first line (the others are its own structures), and S3's code."""
    said = str(error)
    code = _CODE.search(said)
    first = said.partition("\n")[0].partition("<?xml")[0].strip(" .:")[:400]
    return first if code is None else f"{first} ({code[1]})"
