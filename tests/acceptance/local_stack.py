"""A complete ``cloister local`` with its own data directory, used from outside."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ray_job.demo_model import make_demo_model
from service.local.client_env import Client, read_client_env
from service.local.layout import Layout, layout_of
from service.local.processes import end_everything
from service.local.ray_head import free_ports

REPOSITORY = Path(__file__).parents[2]
MODEL = Path(os.environ.get("CLOISTER_TEST_MODEL", REPOSITORY / "build" / "demo_model"))
# With few rows at a time, a batch is long enough in the middle of its work to be killed there.
ENGINE_ARGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 32}
MODELS: list[dict[str, Any]] = [
    {
        "id": "demo",
        "accelerator": "cpu",
        "endpoints": ["/v1/chat/completions", "/v1/completions"],
        "engine_args": ENGINE_ARGS,
        # Small parts, so that a kill in the middle finds some lines committed and others not.
        "batch_size": 16,
    },
    {
        "id": "demo-embed",
        "accelerator": "cpu",
        "endpoints": ["/v1/embeddings"],
        "engine_args": {**ENGINE_ARGS, "runner": "pooling", "convert": "embed"},
    },
]


Stack = TypeVar("Stack", bound="LocalStack")


class LocalStack:
    """One data directory and the ``cloister local`` that runs on it."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.layout: Layout = layout_of(directory / "data")
        self._port = free_ports(1)[0]
        self._models_file = directory / "models.yaml"
        self._models_file.write_text(yaml.safe_dump({"models": [entry | {"source": str(model)} for entry in MODELS]}))
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "service.cli", "local", f"--port={self._port}"]
        command += [f"--data-dir={self.layout.data_dir}", f"--models={self._models_file}"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("cloister is ready"):
                return
        raise AssertionError("".join(lines))

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate(timeout=90)
        end_everything(self.layout)

    def cloister(self, *arguments: str) -> str:
        """Run ``cloister …`` on this stack and return its output."""
        command = [sys.executable, "-m", "service.cli", *arguments, f"--data-dir={self.layout.data_dir}"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=90)

    @property
    def client(self) -> Client:
        client = read_client_env(self.layout.client_env)
        assert client is not None
        return client


@contextmanager
def started(kind: type[Stack], directory: Path) -> Iterator[Stack]:
    """Run a stack of a kind with the demo model, and stop it."""
    make_demo_model(MODEL)
    stack = kind(directory, MODEL)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
