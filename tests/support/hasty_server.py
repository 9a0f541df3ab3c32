"""``python -m tests.support.hasty_server MODEL``: the server with a fraction of its time limits."""

from langchain_art_server import __main__ as door
from langchain_art_server.backends.ipc import heartbeat, worker
from langchain_art_server.gateway import health, http_protocol
from langchain_art_server.jobs import job_runner


def main() -> None:
    heartbeat.TICK_SECONDS = worker.TICK_SECONDS = 0.4
    health.PROBE_SECONDS = job_runner.RETRY_SECONDS = 1.0
    http_protocol.HEADER_SECONDS = 2.0
    door.cli()


if __name__ == "__main__":
    main()
