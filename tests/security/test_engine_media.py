"""The second wall against media URLs: a real engine server, and vLLM's own loader with its configuration."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import ENGINE_ENVIRONMENT, effective_engine_args, engine_flags, server_args
from ray_job.engines.engine_process import EngineProcess
from ray_job.engines.llm_stages import engine_actor

# Importing vLLM warns of torch's own deprecations.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5Erk"
    "Jggg=="
)


@pytest.fixture
def listener() -> Iterator[tuple[int, list[str]]]:
    """A port, and the peers that connected to it."""
    peers: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, peer = server.accept()
                    peers.append(peer[0])
                    connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1], peers
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def model(source: Path, **changes: Any) -> ModelSpec:
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    return ModelSpec(id="demo", source=str(source), engine_args=arguments, **changes)


def configured(kind: str, spec: ModelSpec) -> Any:
    """vLLM's model configuration as the engine of this kind creates it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    if kind == "direct":
        from ray_job.engines.engine_server import import_vllm

        arguments = AsyncEngineArgs.from_cli_args(import_vllm(engine_flags(server_args(spec))))
    else:
        # Of server_args, the deployment of Ray Serve passes on what is no argument of the engine to the server.
        arguments = AsyncEngineArgs(**effective_engine_args(spec))
    return arguments.create_model_config()


@pytest.mark.parametrize("kind", ["direct", "processor", "serve"])
def test_vllms_loader_fetches_nothing_with_the_configuration_of_each_engine(
    kind: Any, demo_model: Path, listener: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.multimodal.media import MediaConnector

    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # It looks at all modules of the process, and some that other tests import cannot stand that.
    monkeypatch.setattr("vllm.triton_utils.dispatcher._rebind_kernels", lambda _: None)
    config = configured(kind, model(demo_model, engine=kind))
    loader = MediaConnector(
        allowed_local_media_path=config.allowed_local_media_path, allowed_media_domains=config.allowed_media_domains
    )
    port, peers = listener
    picture = tmp_path / "secret.png"
    picture.write_bytes(b"x")
    for scheme in ("http", "HTTP", "https"):
        with pytest.raises(ValueError, match="allowed domains"):
            loader.fetch_image(f"{scheme}://127.0.0.1:{port}/x.png")
        with pytest.raises(ValueError, match="allowed domains"):
            asyncio.run(loader.fetch_audio_async(f"{scheme}://127.0.0.1:{port}/x.wav"))
    for host in (*config.allowed_media_domains, "data", "data:"):
        with pytest.raises(ValueError, match="allowed domains"):
            loader.fetch_image(f"http://{host}/x.png")
    with pytest.raises(RuntimeError, match="allowed-local-media-path"):
        loader.fetch_image(picture.as_uri())
    assert loader.fetch_image(PIXEL).size == (1, 1)
    assert peers == []


def test_configuration_of_a_model_cannot_open_the_wall(demo_model: Path) -> None:
    opened = {"allowed_media_domains": ["example.com"], "allowed_local_media_path": "/"}
    arguments = effective_engine_args(ModelSpec(id="demo", source=str(demo_model), engine_args=opened))
    assert arguments["allowed_media_domains"] == ["data:"]
    assert not arguments["allowed_local_media_path"]


def test_engines_of_ray_get_the_environment_too(demo_model: Path) -> None:
    for accelerator in ("cpu", "a10g"):
        variables = engine_actor(model(demo_model, accelerator=accelerator))["runtime_env"]["env_vars"]
        assert ENGINE_ENVIRONMENT.items() <= variables.items()


def test_engine_server_connects_to_no_address_that_a_request_names(
    demo_model: Path, listener: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    monkeypatch.setenv("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "true")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    port, peers = listener

    async def attack() -> list[int]:
        engine = EngineProcess(engine_flags(server_args(model(demo_model))))
        try:
            await engine.wait_ready()
            # The server and the engine core are forked from this process, and so have its environment.
            assert ENGINE_ENVIRONMENT.items() <= psutil.Process(engine.pid).environ().items()
            bodies = [
                {
                    "messages": [
                        {"role": "user", "content": [{"type": kind, kind: {"url": f"http://127.0.0.1:{port}/"}}]}
                    ]
                }
                for kind in ("image_url", "audio_url", "video_url")
            ]
            return [(await engine.post("/v1/chat/completions", json.dumps(body).encode()))[0] for body in bodies]
        finally:
            await engine.stop()

    statuses = asyncio.run(attack())
    assert (statuses, peers) == ([400, 400, 400], [])
