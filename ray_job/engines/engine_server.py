"""vLLM's own OpenAI API application on a Unix socket, started quickly and ended surely.

``python -m ray_job.engines.engine_server SOCKET [vLLM options]`` serves until its standard input closes.

It differs from vLLM's API server in how it starts and ends, in nothing that a client sees:

- vLLM is imported once. vLLM's CPU platform and its Ray integration insist on starting the engine core as
  a fresh Python, which imports everything again (and its worker a third time). Here the engine core is
  forked from this process, which is small and has no threads or device state of its own at that point.
  With a GPU vLLM's own choice stands: it forks unless CUDA is in use already.
- The model's class, too, is imported once, by this process. vLLM looks at it in another fresh Python, lest CUDA
  comes into use in this one; a CPU has nothing of that kind.
- An engine core that died takes this process with it before any of its requests are answered, so that
  the caller can tell a request that failed from an engine that died.
- When the caller dies, however it dies, its end of the pipe closes and this process ends at once.
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
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

EXIT_ENGINE_DIED: Final = 70
SERVER_ERROR: Final = 500
PR_SET_PDEATHSIG: Final = 1


def end_with_caller(directory: Path) -> None:
    """Ends this process when standard input closes, which the kernel does for a caller that was killed.

    The directory of the socket and the log, which the caller cannot remove any more, goes with it.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="end-with-caller").start()


def end_children_with_this_process() -> None:
    """Lets the kernel end forked children (the engine core) when this process is gone."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def end_with_engine(app: Any, engine: Any) -> Any:
    """Wraps an ASGI application: a server error of an engine that died ends the process instead."""

    async def wrapped(scope: Any, receive: Any, send: "Callable[[Any], Awaitable[None]]") -> None:
        async def checked_send(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] >= SERVER_ERROR and engine.errored:
                sys.stderr.flush()
                os._exit(EXIT_ENGINE_DIED)
            await send(message)

        await app(scope, receive, checked_send)

    return wrapped


def import_model_class(model: str) -> None:
    """Imports the class of a model's architecture, and tells vLLM that it is there; one it does not know is left to it.

    Args:
        model: the directory with ``config.json``.
    """
    from vllm.model_executor.models import ModelRegistry

    file = Path(model) / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    for architecture in config.get("architectures") or ():
        if (known := ModelRegistry.models.get(architecture)) is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def start_engine(options: list[str]) -> tuple[Any, Any]:
    """Starts vLLM's engine; returns the engine client and vLLM's parsed options."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # where it stood before vLLM 0.30
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    if current_platform.is_cpu():
        import_model_class(arguments.model)
    usage_context = UsageContext.OPENAI_API_SERVER
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(usage_context=usage_context)
    if current_platform.is_cpu():
        # create_engine_config has just set this to "spawn"; see the module's docstring.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine = AsyncLLM.from_vllm_config(
        vllm_config=config, usage_context=usage_context, disable_log_stats=arguments.disable_log_stats
    )
    return engine, arguments


async def serve(socket_path: str, options: list[str]) -> None:
    """Starts the engine and serves vLLM's application on the socket; the socket appears when it is ready."""
    import uvicorn
    from vllm.entrypoints.openai.api_server import build_app, init_app_state

    engine, arguments = start_engine(options)
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(arguments, tasks, engine.vllm_config.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        config = uvicorn.Config(
            end_with_engine(app, engine), uds=socket_path, access_log=False, log_level="warning", lifespan="on"
        )
        await uvicorn.Server(config).serve()
    finally:
        engine.shutdown()


def main() -> None:
    """The command line."""
    # vLLM's CPU platform turns the "uni" executor into a second process unless this is off; the engine core
    # still runs in a process of its own.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    end_with_caller(Path(sys.argv[1]).parent)
    end_children_with_this_process()
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))


if __name__ == "__main__":
    main()
