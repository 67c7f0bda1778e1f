"""Paths, private files, the environment of children, client.env, the lock and the demo's lines."""

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.local.client_env import FIRST_STEPS, Client, read_client_env, write_client_env
from service.local.demo_lines import BROKEN, TOTAL, demo_lines
from service.local.errors import LocalError
from service.local.keys import make_keys
from service.local.layout import Layout, layout_of, make_directories, take_lock
from service.local.processes import CHILD, LOCAL_ID, child_environment
from service.local.ray_head import make_token
from service.local.supervisor import Child, Supervisor

CLIENT = Client(base_url="http://127.0.0.1:8000/v1", api_key="sk-cloister-made-up")


def test_data_directory_always_has_the_same_runtime_directory(tmp_path: Path) -> None:
    assert layout_of(tmp_path / "a").runtime_dir == layout_of(tmp_path / "b" / ".." / "a").runtime_dir
    assert layout_of(tmp_path / "a").runtime_dir != layout_of(tmp_path / "b").runtime_dir


def test_socket_path_is_below_the_limit_for_any_data_directory() -> None:
    session = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    assert len(str(layout_of(Path("/" + "x" * 200)).ray_dir / session)) < 107


def test_child_is_marked_and_does_not_inherit_another_ray(tmp_path: Path) -> None:
    layout = layout_of(tmp_path)
    environment = child_environment(layout, "api", {"RAY_ADDRESS": "x", "HOME": "/h"}, offline=True, gpu=False)
    assert (environment[LOCAL_ID], environment[CHILD]) == (layout.local_id, "api")
    assert "RAY_ADDRESS" not in environment
    assert environment["HOME"] == "/h"


def test_kv_cache_size_of_the_caller_takes_precedence(tmp_path: Path) -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "8"}
    environment = child_environment(layout_of(tmp_path), "ray", given, offline=False, gpu=False)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert "HF_HUB_OFFLINE" not in environment


def test_local_ray_does_not_change_the_niceness_of_engines(tmp_path: Path) -> None:
    environment = child_environment(layout_of(tmp_path), "ray", {}, offline=False, gpu=False)
    assert environment["RAY_worker_niceness"] == "0"


def test_client_env_is_private_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "client.env"
    write_client_env(path, CLIENT)
    write_client_env(path, CLIENT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_client_env(path) == CLIENT


def test_incomplete_client_env_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "client.env").write_text("OPENAI_BASE_URL=http://127.0.0.1:8000/v1\n")
    assert read_client_env(tmp_path / "client.env") is None
    assert read_client_env(tmp_path / "missing") is None


def test_printed_python_compiles(tmp_path: Path) -> None:
    block = FIRST_STEPS.format(base_url=CLIENT.base_url, api_key=CLIENT.api_key, model_id="demo", client_env=tmp_path)
    start = block.index("  from openai")
    code = "\n".join(line[2:] for line in block[start:].splitlines())
    compile(code, "first_steps", "exec")
    assert len(code.splitlines()) == 6


def test_second_run_on_the_same_data_directory_is_refused(tmp_path: Path) -> None:
    take_lock(tmp_path / "lock")
    with pytest.raises(LocalError, match="in use by process"):
        take_lock(tmp_path / "lock")


def test_large_log_is_rotated_and_a_small_one_kept(tmp_path: Path) -> None:
    log = tmp_path / "api.log"

    def run() -> bytes:
        supervisor = Supervisor(print)
        supervisor.start(Child(name="api", command=[sys.executable, "-c", "print('new')"], environment={}, log=log))
        supervisor.reap()
        return log.read_bytes()

    log.write_text("old\n")
    assert run() == b"old\nnew\n"
    log.write_bytes(b"x" * 20_000_001)
    assert run() == b"new\n"
    assert (tmp_path / "api.log.1").stat().st_size == 20_000_001


def test_demo_file_is_always_the_same_and_has_its_broken_lines() -> None:
    lines = list(demo_lines("demo"))
    assert lines == list(demo_lines("demo"))
    ids = [json.loads(line)["custom_id"] for line in lines]
    assert len(set(ids)) == TOTAL >= 200
    assert sum(custom_id.startswith("broken") for custom_id in ids) == BROKEN


NOBODY = 65534
only_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    root = tmp_path / "run"
    root.mkdir(mode=0o1777)
    root.chmod(0o1777)  # as /tmp
    return layout_of(tmp_path / "data", runtime_root=root)


def test_runtime_directory_is_private_and_may_be_left_over(layout: Layout) -> None:
    make_directories(layout)
    make_directories(layout)
    assert stat.S_IMODE(layout.runtime_dir.lstat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_runtime_directory_open_to_others_is_refused(layout: Layout, mode: int) -> None:
    layout.runtime_dir.mkdir()
    layout.runtime_dir.chmod(mode)
    with pytest.raises(LocalError, match="is open to other users"):
        make_directories(layout)
    assert list(layout.runtime_dir.iterdir()) == []


@only_as_root
def test_runtime_directory_of_another_user_is_refused(layout: Layout) -> None:
    layout.runtime_dir.mkdir(mode=0o700)
    os.chown(layout.runtime_dir, NOBODY, NOBODY)
    with pytest.raises(LocalError, match="belongs to user 65534"):
        make_directories(layout)
    assert list(layout.runtime_dir.iterdir()) == []


def test_runtime_directory_that_is_a_symbolic_link_is_refused(layout: Layout, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    layout.runtime_dir.symlink_to(target)
    with pytest.raises(LocalError, match="is not a directory"):
        make_directories(layout)
    assert list(target.iterdir()) == []


def test_runtime_root_where_others_can_rename_directories_is_refused(layout: Layout) -> None:
    layout.runtime_dir.parent.chmod(0o777)
    with pytest.raises(LocalError, match="sticky"):
        make_directories(layout)


def test_token_is_new_at_each_start_and_private(layout: Layout) -> None:
    make_directories(layout)
    make_token(layout)
    first = layout.ray_token.read_text()
    make_token(layout)
    second = layout.ray_token.read_text()
    assert (len(first), len(second), first != second) == (64, 64, True)
    assert stat.S_IMODE(layout.ray_token.lstat().st_mode) == 0o600


@pytest.mark.parametrize("plant", [Path.hardlink_to, Path.symlink_to])
def test_token_is_not_written_through_a_link(
    layout: Layout, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    make_directories(layout)
    planted = tmp_path / "planted"
    planted.write_text("")
    plant(layout.ray_token, planted)
    make_token(layout)
    assert planted.read_text() == ""
    assert not layout.ray_token.is_symlink()


def test_token_is_not_written_into_an_existing_file(layout: Layout) -> None:
    make_directories(layout)
    layout.ray_token.touch()
    layout.ray_token.chmod(0o666)
    with layout.ray_token.open() as opened_before:
        make_token(layout)
        assert opened_before.read() == ""
    assert stat.S_IMODE(layout.ray_token.lstat().st_mode) == 0o600


def test_keys_are_private_and_made_once(tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "data", runtime_root=tmp_path)
    make_directories(layout)
    make_keys(layout)
    keys = (layout.encryption_keys, layout.receipt_key)
    made = [path.read_text() for path in keys]
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)
    make_keys(layout)
    assert [path.read_text() for path in keys] == made
