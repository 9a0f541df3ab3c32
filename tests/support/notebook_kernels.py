"""A real IPython kernel, as a notebook has one, and what its cells show."""

import queue
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

#: Seconds without a message after which a kernel counts as hanging.
_PATIENCE = 240


@dataclass
class Shown:
    """Output of a cell: of a display only what it shows last."""

    displays: list[str] = field(default_factory=list)
    text: str = ""
    error: list[str] = field(default_factory=list)
    updates: int = 0


class Kernel:
    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager, self._client = manager, client

    def run(self, code: str, seen: Callable[[str], bool] = lambda _: False) -> Shown:
        """Execute a cell to its end; interrupted as soon as `seen` is true of a display."""
        asked, shown, interrupted = self._client.execute(code), Shown(), False
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=_PATIENCE)
            except queue.Empty as error:
                raise AssertionError(f"the kernel hangs; it has shown {shown}") from error
            kind, content = message["msg_type"], message["content"]
            html = content.get("data", {}).get("text/html") or ""
            if kind in ("display_data", "execute_result"):
                shown.displays.append(html)
            elif kind == "update_display_data":
                shown.displays[-1] = html
                shown.updates += 1
            elif kind == "stream":
                shown.text += content["text"]
            elif kind == "error":
                shown.error = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in content["traceback"]]
            elif kind == "status":
                ours = message["parent_header"].get("msg_id") == asked
                if ours and content["execution_state"] == "idle":
                    return shown
            if not interrupted and seen(html):
                interrupted = True
                self._manager.interrupt_kernel()

    def restart(self) -> None:
        """Kill the kernel and start another, as "Restart kernel" does."""
        self._manager.restart_kernel(now=True)
        self._client.wait_for_ready(timeout=_PATIENCE)


@contextmanager
def running_kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel whose working directory is `folder`."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=_PATIENCE)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
