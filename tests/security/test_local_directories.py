"""Another user of the machine can neither prepare the directories of ``cloister local`` nor read what is in them."""

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from ray_job.object_urls import put_object
from service.adapters.directory_object_store import DirectoryObjectStore
from service.local.errors import LocalError
from service.local.layout import Layout, layout_of, make_directories, write_private_file
from service.local.processes import child_environment, end_everything
from service.local.ray_head import command, free_ports, make_token
from service.local.supervisor import Child, Supervisor

NOBODY = 65534
SECRET = b"prompt of another user"
only_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter, as /home is; pytest's own directories are closed."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def layout(place: Path) -> Iterator[Layout]:
    layout = layout_of(place / "data", environment={})
    yield layout
    shutil.rmtree(layout.runtime_dir, ignore_errors=True)


def as_nobody(script: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", "-c", script], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False, cwd="/"
    )


def start(layout: Layout) -> subprocess.CompletedProcess[str]:
    """Start ``cloister local``, which must refuse at once."""
    (port,) = free_ports(1)
    program = [sys.executable, "-m", "service.cli", "local", f"--data-dir={layout.data_dir}", f"--port={port}"]
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False, env=environment)


@only_as_root
@pytest.mark.slow
@pytest.mark.parametrize("attack", ["mkdir -m 777 {}", "mkdir -m 700 {}", "ln -s /tmp {}"])
def test_prepared_runtime_directory_is_refused(layout: Layout, attack: str) -> None:
    assert as_nobody(attack.format(layout.runtime_dir)).returncode == 0
    try:
        refused = start(layout)
        assert refused.returncode != 0
        assert str(layout.runtime_dir) in refused.stderr + refused.stdout
        assert "Remove it" in refused.stderr + refused.stdout
        assert layout.runtime_dir.is_symlink() or not list(layout.runtime_dir.iterdir())
    finally:
        as_nobody(f"rm -r {layout.runtime_dir}")


@only_as_root
@pytest.mark.slow
def test_data_directory_of_another_user_is_refused(layout: Layout) -> None:
    layout.data_dir.mkdir()
    os.chown(layout.data_dir, NOBODY, NOBODY)
    refused = start(layout)
    assert refused.returncode != 0
    assert "belongs to user 65534" in refused.stderr + refused.stdout
    assert list(layout.data_dir.iterdir()) == []


@only_as_root
@pytest.mark.parametrize("name", ["objects", "logs"])
def test_prepared_directory_inside_the_data_directory_is_refused(layout: Layout, name: str) -> None:
    layout.data_dir.mkdir()
    (layout.data_dir / name).mkdir(mode=0o777)
    os.chown(layout.data_dir / name, NOBODY, NOBODY)
    with pytest.raises(LocalError, match="belongs to user 65534"):
        make_directories(layout)


def test_data_directory_is_not_followed_through_a_symbolic_link_that_appears_late(place: Path) -> None:
    layout = layout_of(place / "data", environment={})
    victim = place / "home"
    victim.mkdir(mode=0o755)
    layout.data_dir.symlink_to(victim)
    with pytest.raises(LocalError, match="is not a directory"):
        make_directories(layout)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755


def all_files(layout: Layout) -> list[Path]:
    return [path for root in (layout.data_dir, layout.runtime_dir) for path in root.rglob("*")]


def write_content(layout: Layout) -> None:
    """Write a file of each kind that holds prompts or keys, as the processes of the stack do."""
    make_directories(layout)
    make_token(layout)
    write_private_file(layout.client_env, "OPENAI_API_KEY=x\n")
    DirectoryObjectStore(layout.objects).put("files/file-1", [SECRET])
    spooling = f"import tempfile, pathlib; tempfile.mkstemp(); pathlib.Path('{layout.temporary_dir}/part').touch()"
    supervisor = Supervisor(print)
    environment = child_environment(layout, "api", os.environ, offline=True, gpu=False)
    supervisor.start(
        Child(name="api", command=[sys.executable, "-c", spooling], environment=environment, log=layout.log("api"))
    )
    supervisor.reap()


def test_part_that_a_job_writes_is_private_whatever_the_umask_is(place: Path) -> None:
    async def write() -> None:
        async with aiohttp.ClientSession() as session:
            await put_object(session, (place / "1.part").as_uri(), SECRET)

    umask = os.umask(0)
    try:
        asyncio.run(write())
    finally:
        os.umask(umask)
    assert stat.S_IMODE((place / "1.part").stat().st_mode) == 0o600


def test_all_files_are_private_whatever_the_umask_is(layout: Layout) -> None:
    umask = os.umask(0)
    try:
        write_content(layout)
    finally:
        os.umask(umask)
    assert (layout.temporary_dir / "part").exists()
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in all_files(layout)}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


@only_as_root
def test_another_user_reads_nothing(layout: Layout) -> None:
    write_content(layout)
    for path in [*all_files(layout), layout.data_dir, layout.runtime_dir]:
        assert as_nobody(f"ls {path} || cat {path} || echo x > {path}").returncode != 0
    assert as_nobody(f"ls {layout.data_dir.parent}").returncode == 0


@pytest.fixture
def private(place: Path) -> Path:
    """A directory as systemd's /run/user/1000."""
    directory = place / "run"
    directory.mkdir(mode=0o700)
    return directory


def test_private_runtime_directory_of_the_user_is_preferred(place: Path, private: Path) -> None:
    layout = layout_of(place / "data", environment={"XDG_RUNTIME_DIR": str(private)})
    assert layout.runtime_dir.parent == private
    make_directories(layout)
    # It is memory: large temporary files and spilled objects go to the disk of the data directory.
    assert layout.temporary_dir.is_relative_to(layout.data_dir)
    (spill,) = [each for each in command(layout, dashboard_port=1) if each.startswith("--object-spilling-directory=")]
    assert Path(spill.partition("=")[2]).is_relative_to(layout.data_dir)
    session = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    assert len(str(layout.ray_dir / session)) < 107


def test_other_commands_find_the_directories_of_a_running_stack(place: Path, private: Path) -> None:
    layout = layout_of(place / "data", environment={"XDG_RUNTIME_DIR": str(private)})
    make_directories(layout)
    assert layout_of(place / "data", environment={}) == layout
    end_everything(layout)
    assert not layout.runtime_dir.exists()
    assert not layout.temporary_dir.exists()
    assert layout_of(place / "data", environment={}).runtime_dir.parent == Path("/tmp")  # noqa: S108 - the default


@pytest.mark.parametrize("spoil", ["missing", "open", "link", "long", "relative", "owner"])
def test_unsafe_runtime_directory_of_the_user_is_not_used(place: Path, private: Path, spoil: str) -> None:
    given = private
    if spoil == "missing":
        given = place / "missing"
    elif spoil == "open":
        private.chmod(0o755)
    elif spoil == "link":
        given = place / "link"
        given.symlink_to(private)
    elif spoil == "long":
        given = place / ("x" * 60)
        given.mkdir(mode=0o700)
    elif spoil == "relative":
        given = Path(os.path.relpath(private))
    elif os.geteuid() == 0:
        os.chown(private, NOBODY, NOBODY)
    else:
        pytest.skip("only root can give a directory away")
    layout = layout_of(place / "data", environment={"XDG_RUNTIME_DIR": str(given)})
    assert layout.runtime_dir.parent == Path("/tmp")  # noqa: S108 - the default
