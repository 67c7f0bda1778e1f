"""vLLM's own OpenAI application on a Unix socket, with a faster start and a reliable end.

``python -m ray_job.engines.engine_server SOCKET [vLLM options]`` serves until its standard input closes.

It differs from vLLM's API server only in how it starts and ends, which clients do not see:

- vLLM is imported once. vLLM's CPU platform and its Ray integration start the engine core as a new Python process,
  which imports everything again, and its worker a third time. Here the engine core is forked from this process, which
  is small and has no threads or device state at that point. With a GPU vLLM's own choice applies: it forks unless
  CUDA is already in use.
- The model's class is imported once, by this process. vLLM inspects it in another new Python process to keep CUDA
  out of this one, which a CPU does not need.
- When the engine core dies, this process exits before it answers any of the core's requests, so that the caller can
  distinguish a failed request from a dead engine.
- When the caller dies, its end of the pipe closes and this process exits at once.
"""

import asyncio
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ray_job.engines.engine_process import LIMITS_FILE, PROMPT_RULES_FILE
from ray_job.engines.engine_rules import prompt_rules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import uvicorn

EXIT_ENGINE_DIED: Final = 70
KEEP_ALIVE_S: Final = 86_400
SERVER_ERROR: Final = 500
PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run the command line."""
    # Otherwise vLLM's CPU platform starts a second process for the "uni" executor. The engine core still runs in a
    # separate process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    end_with_caller(Path(sys.argv[1]).parent)
    if sys.platform == "linux":
        # The kernel ends forked children, such as the engine core, when this process exits.
        libc = ctypes.CDLL(None)
        os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))


def end_with_caller(directory: Path) -> None:
    """End this process when standard input closes, which the kernel does for a caller that was killed.

    Args:
        directory: the directory of the socket and the log. It is removed, because the caller no longer can.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="end-with-caller").start()


async def serve(socket_path: str, options: list[str]) -> None:
    """Start the engine and serve vLLM's application. The socket appears when the engine is ready.

    Args:
        socket_path: the socket to create.
        options: vLLM's command-line options.
    """
    import uvicorn
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # its place before vLLM 0.30
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    if current_platform.is_cpu():
        from vllm.model_executor.models import ModelRegistry

        # Import the class of the model's architecture here. Architectures that vLLM does not know are left to it.
        file = Path(arguments.model) / "config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
        for architecture in config.get("architectures") or ():
            if (known := ModelRegistry.models.get(architecture)) is not None:
                ModelRegistry.register_model(architecture, known.load_model_cls())
    usage_context = UsageContext.OPENAI_API_SERVER
    vllm_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(usage_context=usage_context)
    if current_platform.is_cpu():
        # create_engine_config has just set this to "spawn"; see the module's docstring.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine = AsyncLLM.from_vllm_config(
        vllm_config=vllm_config, usage_context=usage_context, disable_log_stats=arguments.disable_log_stats
    )
    try:
        # In a thread: a large vocabulary takes some tenths of a second.
        rules = asyncio.create_task(asyncio.to_thread(prompt_rules, engine, arguments))
        tasks = await engine.get_supported_tasks()
        app = build_app(arguments, tasks, engine.vllm_config.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        if found := await rules:
            Path(socket_path).with_name(PROMPT_RULES_FILE).write_bytes(found.to_json())
        limits = {"max_num_seqs": vllm_config.scheduler_config.max_num_seqs}
        Path(socket_path).with_name(LIMITS_FILE).write_text(json.dumps(limits))
        await uvicorn.Server(server_config(end_with_engine(app, engine), socket_path)).serve()
    finally:
        engine.shutdown()


def end_with_engine(app: Any, engine: Any) -> Any:
    """Wrap an ASGI application so that a server error of a dead engine ends the process instead.

    Args:
        app: vLLM's application.
        engine: vLLM's engine client.
    """

    async def wrapped(scope: Any, receive: Any, send: "Callable[[Any], Awaitable[None]]") -> None:
        async def checked_send(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] >= SERVER_ERROR and engine.errored:
                sys.stderr.flush()
                os._exit(EXIT_ENGINE_DIED)
            await send(message)

        await app(scope, receive, checked_send)

    return wrapped


def server_config(app: Any, socket_path: str, *, lifespan: Literal["on", "off"] = "on") -> "uvicorn.Config":
    """Return the configuration of the HTTP server.

    Args:
        app: the ASGI application.
        socket_path: the socket to create.
        lifespan: whether the application handles ASGI's lifespan events.
    """
    import uvicorn

    return uvicorn.Config(
        app,
        uds=socket_path,
        access_log=False,
        log_level="warning",
        lifespan=lifespan,
        # uvicorn closes idle connections after 5 s and aiohttp after 15 s. The caller would post on closed ones.
        timeout_keep_alive=KEEP_ALIVE_S,
    )


if __name__ == "__main__":
    main()
