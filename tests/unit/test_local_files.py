"""Paths, the children's environment, client.env, the lock and the demo's lines."""

import json
from pathlib import Path

import pytest

from service.local.client_env import Client, first_steps, read_client_env, write_client_env
from service.local.demo_lines import BROKEN, TOTAL, demo_lines
from service.local.environment import CHILD, LOCAL_ID, child_environment
from service.local.errors import LocalError
from service.local.layout import layout_of
from service.local.lock import take_lock
from service.local.supervisor import log_tail, rotate

CLIENT = Client(base_url="http://127.0.0.1:8000/v1", api_key="sk-cloister-made-up")


def test_the_same_data_directory_always_has_the_same_runtime_directory(tmp_path: Path) -> None:
    assert layout_of(tmp_path / "a").runtime_dir == layout_of(tmp_path / "b" / ".." / "a").runtime_dir
    assert layout_of(tmp_path / "a").runtime_dir != layout_of(tmp_path / "b").runtime_dir


def test_a_socket_path_stays_below_the_limit_whatever_the_data_directory() -> None:
    session = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    assert len(str(layout_of(Path("/" + "x" * 200)).ray_dir / session)) < 107


def test_a_child_is_marked_and_hears_nothing_of_another_ray(tmp_path: Path) -> None:
    layout = layout_of(tmp_path)
    environment = child_environment(layout, "api", {"RAY_ADDRESS": "x", "HOME": "/h"}, offline=True, gpu=False)
    assert (environment[LOCAL_ID], environment[CHILD]) == (layout.local_id, "api")
    assert "RAY_ADDRESS" not in environment
    assert environment["HOME"] == "/h"


def test_the_users_own_kv_cache_size_wins(tmp_path: Path) -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "8"}
    environment = child_environment(layout_of(tmp_path), "ray", given, offline=False, gpu=False)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert "HF_HUB_OFFLINE" not in environment


def test_client_env_is_private_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "client.env"
    write_client_env(path, CLIENT)
    write_client_env(path, CLIENT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_client_env(path) == CLIENT


def test_a_client_env_that_lacks_the_key_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "client.env").write_text("OPENAI_BASE_URL=http://127.0.0.1:8000/v1\n")
    assert read_client_env(tmp_path / "client.env") is None
    assert read_client_env(tmp_path / "missing") is None


def test_the_printed_python_compiles(tmp_path: Path) -> None:
    block = first_steps(CLIENT, tmp_path, "demo")
    start = block.index("  from openai")
    code = "\n".join(line[2:] for line in block[start:].splitlines())
    compile(code, "first_steps", "exec")
    assert len(code.splitlines()) == 6


def test_a_second_run_on_the_same_data_directory_is_refused(tmp_path: Path) -> None:
    take_lock(tmp_path / "lock")
    with pytest.raises(LocalError, match="in use by process"):
        take_lock(tmp_path / "lock")


def test_a_large_log_is_rotated_and_a_small_one_kept(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    log.write_text("one\ntwo\n")
    rotate(log)
    assert log_tail(log) == "one\ntwo"
    log.write_bytes(b"x" * 20_000_001)
    rotate(log)
    assert not log.exists()
    assert (tmp_path / "api.log.1").exists()


def test_the_demo_file_is_the_same_each_time_and_has_its_broken_lines() -> None:
    lines = list(demo_lines("demo"))
    assert lines == list(demo_lines("demo"))
    ids = [json.loads(line)["custom_id"] for line in lines]
    assert len(set(ids)) == TOTAL >= 200
    assert sum(custom_id.startswith("broken") for custom_id in ids) == BROKEN
