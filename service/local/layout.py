"""Where ``cloister local`` keeps what lasts (the data directory) and what does not (the runtime directory)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The paths of one data directory.

    Attributes:
        data_dir: absolute; survives restarts and may be moved while nothing runs.
        runtime_dir: sockets, temporary files and Ray's session; made at the start, removed at the stop.
            It is short because a Unix socket's path may have 107 characters at most.
    """

    data_dir: Path
    runtime_dir: Path

    @property
    def local_id(self) -> str:
        """What marks every process of this data directory, in its environment."""
        return self.runtime_dir.name

    @property
    def postgres_data(self) -> Path:
        """Postgres' own data directory."""
        return self.data_dir / "postgres"

    @property
    def postgres_socket_dir(self) -> Path:
        """The directory of Postgres' Unix socket."""
        return self.runtime_dir / "pg"

    @property
    def ray_dir(self) -> Path:
        """Ray's temp dir: sockets, spilled objects, session logs."""
        return self.runtime_dir / "ray"

    @property
    def ray_token(self) -> Path:
        """What Ray asks of everyone who talks to it; new at each start."""
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
        """One log per child."""
        return self.data_dir / "logs"

    @property
    def lock(self) -> Path:
        """Held by the supervisor and its guard."""
        return self.data_dir / "lock"

    def log(self, child: str) -> Path:
        """The log of one child."""
        return self.logs / f"{child}.log"

    def database_url(self, user: str) -> str:
        """How ``user`` reaches the database; no password, since only this account can open the socket."""
        return f"postgresql://{user}@/cloister?host={self.postgres_socket_dir}"


def layout_of(data_dir: Path, *, runtime_root: Path = Path("/tmp")) -> Layout:  # noqa: S108 - short on purpose
    """The layout of a data directory; the same directory always gives the same one."""
    absolute = data_dir.resolve()
    digest = hashlib.sha256(str(absolute).encode()).hexdigest()[:8]
    return Layout(data_dir=absolute, runtime_dir=runtime_root / f"cloister-{digest}")


def make_directories(layout: Layout) -> None:
    """Makes the directories, readable by this account only."""
    for directory in (layout.data_dir, layout.objects, layout.logs):
        directory.mkdir(parents=True, exist_ok=True)
    layout.data_dir.chmod(0o700)
    for directory in (layout.runtime_dir, layout.temporary_dir, layout.ray_dir):
        directory.mkdir(mode=0o700, exist_ok=True)
