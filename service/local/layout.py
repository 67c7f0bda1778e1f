"""Files and directories of ``cloister local``, its lock, and the checks that keep other users of the machine out.

The data directory lasts. The runtime directory holds sockets and Ray's token while the stack runs. Whoever reads the
token can run code as this user, and whoever reads the other files reads prompts. So nothing is written into a directory
that another user could have created or can open.
"""

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import filelock
import psutil

from service.local.errors import LocalError

GUARD_WAIT_S = 60.0
_MAX_SOCKET_PATH: Final = 107
_LONGEST_RAY_SOCKET: Final = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
# vLLM names its sockets by a UUID.
_LONGEST_TEMPORARY_SOCKET: Final = "01234567-89ab-cdef-0123-456789abcdef.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Paths of one data directory.

    Attributes:
        data_dir: absolute; survives restarts and may be moved while nothing runs.
        runtime_dir: created at the start and removed at the stop. Its path is short, because the path of a Unix socket
            has at most 107 bytes.
        temporary_dir: TMPDIR of every child, on a disk; removed at the stop too.
    """

    data_dir: Path
    runtime_dir: Path
    temporary_dir: Path

    @property
    def local_id(self) -> str:
        """The mark of every process of this data directory, in its environment."""
        return self.runtime_dir.name

    @property
    def postgres_data(self) -> Path:
        """Postgres's data directory."""
        return self.data_dir / "postgres"

    @property
    def postgres_socket_dir(self) -> Path:
        """The directory of Postgres's Unix socket."""
        return self.runtime_dir / "pg"

    @property
    def ray_dir(self) -> Path:
        """Ray's temporary directory: sockets and session logs."""
        return self.runtime_dir / "ray"

    @property
    def ray_spill_dir(self) -> Path:
        """Objects of Ray that do not fit into its memory."""
        return self.temporary_dir / "ray-spill"

    @property
    def ray_token(self) -> Path:
        """The token that Ray requires from every client; new at each start."""
        return self.runtime_dir / "ray-token"

    @property
    def objects(self) -> Path:
        """The object store."""
        return self.data_dir / "objects"

    @property
    def encryption_keys(self) -> Path:
        """The keys that encrypt secrets in the database."""
        return self.data_dir / "encryption-keys"

    @property
    def models_file(self) -> Path:
        """The model catalogue."""
        return self.data_dir / "models.yaml"

    @property
    def client_env(self) -> Path:
        """Base URL and API key, for scripts."""
        return self.data_dir / "client.env"

    @property
    def receipt_key(self) -> Path:
        """The private key that signs deletion receipts."""
        return self.data_dir / "receipt-key"

    @property
    def logs(self) -> Path:
        """The directory of the logs, one for each child."""
        return self.data_dir / "logs"

    @property
    def lock(self) -> Path:
        """The lock file, held by the supervisor and its guard."""
        return self.data_dir / "lock"

    @property
    def place(self) -> Path:
        """The file that names the runtime and the temporary directory while the stack runs."""
        return self.data_dir / "runtime-dir"

    def log(self, child: str) -> Path:
        """Return the log of one child."""
        return self.logs / f"{child}.log"

    def database_url(self, user: str, database: str = "cloister") -> str:
        """Return a database URL of ``user``. It has no password, because only this account can open the socket."""
        return f"postgresql://{user}@/{database}?host={self.postgres_socket_dir}"


def layout_of(
    data_dir: Path,
    *,
    runtime_root: Path = Path("/tmp"),  # noqa: S108 - short; see make_directories
    environment: Mapping[str, str] = os.environ,
) -> Layout:
    """Return the layout of a data directory: the one that it was started with, or else that of its next start.

    The runtime directory is in ``XDG_RUNTIME_DIR`` if that is private and its path is short. It is in memory, so
    temporary files are below the data directory then. Otherwise both are in ``runtime_root``.

    Args:
        data_dir: the data directory; it may be missing.
        runtime_root: the directory that all users share.
        environment: the environment variables.
    """
    absolute = data_dir.resolve()
    digest = hashlib.sha256(str(absolute).encode()).hexdigest()[:8]
    runtime_dir = runtime_root / f"cloister-{digest}"
    layout = Layout(data_dir=absolute, runtime_dir=runtime_dir, temporary_dir=runtime_dir / "tmp")
    with contextlib.suppress(OSError, ValueError):
        started, temporary = map(Path, layout.place.read_text().splitlines())
        if started.is_absolute() and started.name == layout.local_id:
            return replace(layout, runtime_dir=started, temporary_dir=temporary)
    own_root = Path(environment.get("XDG_RUNTIME_DIR", ""))
    own = replace(layout, runtime_dir=own_root / layout.local_id, temporary_dir=absolute / "tmp")
    with contextlib.suppress(OSError):
        is_short = (
            len(str(own.ray_dir / _LONGEST_RAY_SOCKET)) <= _MAX_SOCKET_PATH
            and len(str(own.temporary_dir / _LONGEST_TEMPORARY_SOCKET)) <= _MAX_SOCKET_PATH
        )
        if own_root.is_absolute() and is_short and not runtime_dir_problem(own_root):
            return own
    return layout


def make_data_directory(layout: Layout) -> None:
    """Create the data directory, and close it to other users.

    Raises:
        LocalError: it belongs to another user, or is not a directory.
    """
    layout.data_dir.parent.mkdir(parents=True, exist_ok=True)
    _make_private(layout.data_dir, flags=os.O_NOFOLLOW)


def make_directories(layout: Layout) -> None:
    """Create the directories, readable by this account only, and record where they are.

    The name of the runtime directory can be guessed, and every user can create it in /tmp first. A directory that this
    account does not own, or that others can enter, is therefore refused.

    Raises:
        LocalError: a directory is not safe to use.
    """
    make_data_directory(layout)
    for directory in (layout.objects, layout.logs):
        _make_private(directory)
    root = layout.runtime_dir.parent
    if (mode := root.stat().st_mode) & 0o022 and not mode & stat.S_ISVTX:
        raise LocalError(
            f"{root} is writable by other users and lacks the sticky bit, so they could replace the files of "
            f"`cloister local` there. Run: chmod +t {root}"
        )
    try:
        layout.runtime_dir.mkdir(mode=0o700)
    except FileExistsError:
        if problem := runtime_dir_problem(layout.runtime_dir):
            raise LocalError(
                f"the runtime directory {layout.runtime_dir} {problem}, so `cloister local` does not use it. "
                "Remove it, or choose another --data-dir"
            ) from None
    for directory in (layout.temporary_dir, layout.ray_dir, layout.ray_spill_dir):
        directory.mkdir(mode=0o700, exist_ok=True)
    write_private_file(layout.place, f"{layout.runtime_dir}\n{layout.temporary_dir}\n")


def _make_private(directory: Path, *, flags: int = 0) -> None:
    """Create a directory if it is missing, and close it to other users.

    Raises:
        LocalError: it belongs to another user, or is not a directory.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | flags)
    except OSError:
        problem = "is not a directory that this account can read"
    else:
        try:
            owner = os.fstat(descriptor).st_uid
            problem = "" if owner == os.geteuid() else f"belongs to user {owner}"
            if not problem:
                os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)
    if problem:
        raise LocalError(
            f"the directory {directory} {problem}, so `cloister local` does not use it. Choose another --data-dir"
        )


def runtime_dir_problem(directory: Path) -> str:
    """Return why an existing directory is not safe to use as a runtime directory; empty if it is.

    Symbolic links are not followed.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def write_private_file(path: Path, text: str) -> None:
    """Write a file, complete or not at all, readable by its owner only.

    The content goes to a new file, which then replaces the old one. So it reaches no file that already exists, neither
    through a link nor through a descriptor that another process holds open.
    """
    staging = path.with_name(f"{path.name}.new")
    staging.unlink(missing_ok=True)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    staging.replace(path)


def take_lock(path: Path) -> int:
    """Lock a data directory and write this process's id into the lock file.

    The supervisor passes the lock to its guard. If the supervisor is killed, the next ``cloister local`` waits until
    the guard has ended the old processes.

    Returns:
        The open file descriptor. The lock is held as long as a process keeps it open.

    Raises:
        LocalError: another ``cloister local`` runs on this data directory.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + GUARD_WAIT_S
    while not filelock.lock_descriptor(descriptor, blocking=False):
        text = path.read_text().strip()
        is_running = text.isdecimal() and psutil.pid_exists(int(text))
        if is_running or time.monotonic() > deadline:
            os.close(descriptor)
            holder = f"process {text}" if is_running else "an earlier run that is still stopping"
            raise LocalError(
                f"the data directory {path.parent} is in use by {holder}: stop it, or choose another --data-dir"
            )
        time.sleep(0.2)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
