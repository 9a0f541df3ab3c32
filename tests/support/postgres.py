"""A PostgreSQL of the tests' own: a cluster in a folder, behind a socket, for nobody else."""

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path


def programs() -> Path | None:
    """The folder of initdb and pg_ctl, if they can be run; Debian has it off the PATH."""
    if os.geteuid() == 0 and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        return None
    found = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    first = Path(found).resolve() if found else debian[-1] if debian else None
    return first.parent if first else None


class Postgres:
    """One cluster. It does not start as root, so there it is the user postgres's."""

    def __init__(self) -> None:
        bin_dir = programs()
        assert bin_dir is not None
        self._bin = bin_dir
        self._home = Path(tempfile.mkdtemp(prefix="art-postgres-"))
        self._as: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(self._home, "postgres")
            self._as = ["runuser", "-u", "postgres", "--"]
        options = ["-U", "art", "--auth=trust", "-E", "UTF8", "--no-sync"]
        self._run("initdb", "-D", f"{self._home}/data", *options)
        self.start()

    def start(self) -> None:
        # No crash here is one of the machine: what was written is there without a flush to disk.
        options = f"-c listen_addresses='' -c unix_socket_directories={self._home} -c fsync=off"
        self._ctl("start", "-o", options, "-l", f"{self._home}/log")

    def crash(self) -> None:
        """End it as a crash does; what it acknowledged is there when it starts again."""
        self._ctl("stop", "-m", "immediate")

    def database(self) -> str:
        """The URL of a new, empty database."""
        import psycopg  # some environments of tests do not have it
        from psycopg import sql

        name = f"art_{uuid.uuid4().hex}"
        with psycopg.connect(host=str(self._home), user="art", dbname="postgres") as connection:
            connection.autocommit = True
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return f"postgresql+psycopg://art@/{name}?host={self._home}"

    def remove(self) -> None:
        self.crash()
        shutil.rmtree(self._home)

    def _ctl(self, *args: str) -> None:
        self._run("pg_ctl", "-D", f"{self._home}/data", "-w", *args)

    def _run(self, program: str, *args: str) -> None:
        argv = [*self._as, str(self._bin / program), *args]
        # Not captured by pipes: the server, which goes on, would hold them open.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(argv, cwd=self._home, stdout=said, stderr=said, timeout=120)
            said.seek(0)
            assert done.returncode == 0, f"{argv}: {said.read().decode()}"
