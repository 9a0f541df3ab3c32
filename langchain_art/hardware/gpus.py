"""The NVIDIA GPUs of this machine, by ``nvidia-smi``: nothing of CUDA is loaded here."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

_QUERY = "--query-gpu=name,memory.total,memory.free,driver_version"


def gpus() -> list[dict[str, Any]]:
    """Name, total and free memory in bytes, and driver of each GPU that CUDA may use.

    ``CUDA_VISIBLE_DEVICES`` chooses and orders them. None if there is no ``nvidia-smi``, or it
    fails, as it does for the names of parts of a GPU (MIG).
    """
    tool, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or visible == "":
        return []
    found: list[dict[str, Any]] = []
    for one in visible.split(",") if visible else [None]:
        argv = [tool, _QUERY, "--format=csv,noheader,nounits", *(["-i", one] if one else [])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return []
        for line in done.stdout.splitlines():
            name, total, free, driver = line.split(", ")
            sizes = {"total": int(total) << 20, "free": int(free) << 20}
            found.append({"name": name, **sizes, "driver": driver})
    return found
