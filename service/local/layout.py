"""Files and directories of ``cloister local``, its lock, and the checks that keep other users of the machine out.

The data directory lasts. The runtime directory holds sockets, temporary files and Ray's token while the stack runs.
Whoever reads the token can run code as this user, so nothing is written into a runtime directory that another user
could have created or can open.
"""

import hashlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import filelock
import psutil

from service.local.errors import LocalError

GUARD_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Paths of one data directory.

    Attributes:
        data_dir: absolute; survives restarts and may be moved while nothing runs.
        runtime_dir: created at the start and removed at the stop. Its path is short, because the path of a Unix socket
            has at most 107 bytes.
    """

    data_dir: Path
    runtime_dir: Path

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
        """Ray's temporary directory: sockets, spilled objects, session logs."""
        return self.runtime_dir / "ray"

    @property
    def ray_token(self) -> Path:
        """The token that Ray requires from every client; new at each start."""
        return self.runtime_dir / "ray-token"

    @property
    def temporary_dir(self) -> Path:
        """TMPDIR of every child."""
        return self.runtime_dir / "tmp"

    @property
    def objects(self) -> Path:
        """The object store."""
        return self.data_dir / "objects"

    @property
    def models_file(self) -> Path:
        """The model catalogue."""
        return self.data_dir / "models.yaml"

    @property
    def client_env(self) -> Path:
        """Base URL and API key, for scripts."""
        return self.data_dir / "client.env"

    @property
    def logs(self) -> Path:
        """The directory of the logs, one for each child."""
        return self.data_dir / "logs"

    @property
    def lock(self) -> Path:
        """The lock file, held by the supervisor and its guard."""
        return self.data_dir / "lock"

    def log(self, child: str) -> Path:
        """Return the log of one child."""
        return self.logs / f"{child}.log"

    def database_url(self, user: str, database: str = "cloister") -> str:
        """Return a database URL of ``user``. It has no password, because only this account can open the socket."""
        return f"postgresql://{user}@/{database}?host={self.postgres_socket_dir}"


def layout_of(data_dir: Path, *, runtime_root: Path = Path("/tmp")) -> Layout:  # noqa: S108 - short; see make_directories
    """Return the layout of a data directory. The same directory always has the same layout."""
    absolute = data_dir.resolve()
    digest = hashlib.sha256(str(absolute).encode()).hexdigest()[:8]
    return Layout(data_dir=absolute, runtime_dir=runtime_root / f"cloister-{digest}")


def make_directories(layout: Layout) -> None:
    """Create the directories, readable by this account only.

    The name of the runtime directory can be guessed, and every user can create it in /tmp first. A directory that this
    account does not own, or that others can enter, is therefore refused.

    Raises:
        LocalError: the runtime directory is not safe to use.
    """
    for directory in (layout.data_dir, layout.objects, layout.logs):
        directory.mkdir(parents=True, exist_ok=True)
    layout.data_dir.chmod(0o700)
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
    for directory in (layout.temporary_dir, layout.ray_dir):
        directory.mkdir(mode=0o700, exist_ok=True)


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
