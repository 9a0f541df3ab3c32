"""A real MLflow server on loopback, in an environment of its own: a backend for OpenTelemetry."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.support.environments import environment
from tests.support.live_server import await_answer, free_port

#: What MLflow's server imports; the package `mlflow` would bring scikit-learn and others, too.
_WANTED = (
    *("mlflow-skinny>=3.6,<4", "flask<4", "flask-cors<7", "sqlalchemy<3", "alembic<2"),
    *("graphene<4", "aiohttp<4", "cryptography", "numpy", "pandas"),
)
#: Serves as ``mlflow server`` does, which imports MLflow in two processes. For a line, prints the
#: spans of all traces, as MLflow's own client reads them.
_SERVE = """
import json, sys, threading
import uvicorn
from mlflow import MlflowClient
from mlflow.server import handlers
from mlflow.server.fastapi_app import app
port, store, artifacts = sys.argv[1:]
handlers.initialize_backend_stores(store, default_artifact_root=artifacts)
server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="warning"))
threading.Thread(target=server.run, daemon=True).start()
for line in sys.stdin:
    found = MlflowClient(line.strip()).search_traces(locations=["0"], max_results=100)
    print(json.dumps([[span.to_dict() for span in trace.data.spans] for trace in found]))
    sys.stdout.flush()
"""


class MlflowServer:
    """Serves while its scope lasts. Its store is a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "mlflow.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._argv = [str(environment("mlflow", [*_WANTED])), "-c", _SERVE, str(port)]
        self._argv += [f"sqlite:///{folder / 'mlflow.db'}", str(folder / "artifacts")]
        # Its own packages alone, and no word to anybody.
        self._env = {name: one for name, one in os.environ.items() if name != "PYTHONPATH"}
        self._env |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead OpenTelemetry's exporter to its first experiment."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{self.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-mlflow-experiment-id=0",
        }

    def traces(self) -> list[list[dict[str, Any]]]:
        """The spans of each trace."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{self.url}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        assert said, self._log.read_text()[-3000:]
        return json.loads(said)

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                text=True,
            )
        await_answer(f"{self.url}/health", self._process, self._log)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=30)  # it ends with its input
