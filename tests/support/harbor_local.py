"""A runtime of Harbor's without containers: commands of this machine, in a folder of their own.

Paths of a container (``/tests``, ``/logs`` …) become paths in the folder, in commands and in what
is uploaded. ``/opt/harbor-langgraph-venv`` is the environment of the Python that runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor import BaseEnvironment, ExecResult

INSIDE = re.compile(r"(?<![\w./-])/(?:app|installed-agent|logs|opt/harbor-[\w-]+|solution|tests)\b")


class LocalEnvironment(BaseEnvironment):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.root = Path(tempfile.mkdtemp(prefix="harbor-local-"))

    @staticmethod
    def type() -> str:
        return "local"

    def _validate_definition(self) -> None:
        """A folder is all that there is."""

    def here(self, text: str) -> str:
        return INSIDE.sub(lambda found: f"{self.root}{found[0]}", text)

    async def start(self, force_build: bool) -> None:
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts", "opt", "tests"):
            (self.root / name).mkdir(parents=True)
        (self.root / "opt/harbor-langgraph-venv").symlink_to(sys.prefix)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = Path(self.here(target_path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.here(Path(source_path).read_text()))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        for path in Path(source_dir).rglob("*"):
            if path.is_file():
                await self.upload_file(path, f"{target_dir}/{path.relative_to(source_dir)}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self.here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self.here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self.here(command)),
            cwd=self.here(cwd or "/app"),
            env={**os.environ, **(self._merge_env(env) or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(
            stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0
        )
