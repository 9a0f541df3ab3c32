"""A real MLflow server on loopback, in an environment of its own: a backend for OpenTelemetry."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.environments import environment
from tests.support.live_server import free_port

#: Prints the spans of all traces, as MLflow's own client reads them.
_READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
found = client.search_traces(locations=["0"], max_results=100)
print(json.dumps([[span.to_dict() for span in trace.data.spans] for trace in found]))
"""


class MlflowServer:
    """Serves while its scope lasts. Its store is a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._python = environment("mlflow", ["mlflow>=3.6,<4"])
        self._folder = folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        store = f"sqlite:///{folder / 'mlflow.db'}"
        self._argv = [self._python, "-m", "mlflow", "server", "--port", str(port)]
        self._argv += ["--backend-store-uri", store, "--workers", "1"]
        # Its own packages alone, and no word to anybody.
        self._env = {name: one for name, one in os.environ.items() if name != "PYTHONPATH"}
        self._env |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        # Else it starts a process for each kind of its jobs, which all import MLflow once more.
        self._env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead OpenTelemetry's exporter to its first experiment."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{self.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-mlflow-experiment-id=0",
        }

    def traces(self) -> list[list[dict[str, Any]]]:
        """The spans of each trace."""
        argv = [self._python, "-c", _READ, self.url]
        done = subprocess.run(argv, capture_output=True, text=True, env=self._env, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def __enter__(self) -> Self:
        log = (self._folder / "mlflow.log").open("wb")
        self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._env)
        log.close()
        while True:
            assert self._process.poll() is None, (self._folder / "mlflow.log").read_text()[-3000:]
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(30)
