import os
import socket
import sys
import threading

import pytest

from langchain_art_server.backends.ipc.fork_server import ForkedProcess, can_fork


@pytest.mark.skipif(not can_fork(), reason="no engine is forked on this system")
def test_threads_that_wait_are_told_the_end_that_another_one_saw() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            ours, server = socket.socketpair()
            process, found = ForkedProcess(ours), list[int]()
            waiting = [
                threading.Thread(target=lambda: found.append(process.wait()))  # noqa: B023
                for _ in range(4)
            ]
            for thread in waiting:
                thread.start()
            with server:
                server.sendall(b"%d\n" % os.getpid())
                server.sendall(b"-9\n")
            while process.poll() is None:
                pass
            for thread in waiting:
                thread.join(30)
            assert found == [-9] * 4
    finally:
        sys.setswitchinterval(before)
