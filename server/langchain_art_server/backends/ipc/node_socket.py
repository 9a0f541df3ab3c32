"""A connection to a process of an engine on another machine, behind a secret.

Small frames are sent at once, and a machine that is gone is noticed within a minute.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import time
from typing import NamedTuple

from langchain_art.errors import EngineUnavailable

log = logging.getLogger(__name__)
#: Bytes of what a connection must begin with.
SECRET_BYTES = 32
#: Seconds for a connection to be made, and for a stranger to say the secret.
_CONNECT_SECONDS, _SECRET_SECONDS = 10.0, 5.0


class NodeAddress(NamedTuple):
    """Address of a process that listens for one connection, which begins with `secret` in hex."""

    host: str
    port: int
    secret: str


def connect(address: NodeAddress) -> socket.socket:
    """Raises EngineUnavailable if no process answers there."""
    try:
        connection = socket.create_connection(address[:2], timeout=_CONNECT_SECONDS)
        connection.sendall(bytes.fromhex(address.secret))
    except OSError as error:
        raise EngineUnavailable(
            f"the port {address.port} of a node does not answer ({error}); the server and the "
            "nodes must reach all ports of the nodes",
            retry_after=5,
        ) from error
    connection.settimeout(None)
    _keep_alive(connection)
    return connection


def accept(listener: socket.socket, secret: bytes, seconds: float) -> socket.socket | None:
    """The connection that begins with the secret; None: it has not come in time."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            found, _ = listener.accept()
        except TimeoutError:
            break
        found.settimeout(_SECRET_SECONDS)
        with contextlib.suppress(OSError):
            said = found.recv(SECRET_BYTES, socket.MSG_WAITALL)
            if hmac.compare_digest(said, secret):
                found.settimeout(None)
                _keep_alive(found)
                return found
        log.warning("A connection to the engine without its secret was closed.")
        found.close()
    log.error("Nobody connected to the engine within %g s.", seconds)
    return None


def _keep_alive(connection: socket.socket) -> None:
    """Send small frames at once, and notice within a minute that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
