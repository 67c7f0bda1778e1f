"""vLLM's own OpenAI application on a Unix socket, with a faster start and a reliable end.

``python -m ray_job.engines.engine_server DIRECTORY [vLLM options]`` serves until its standard input closes, and starts
the engine again for each byte that it reads there.

It differs from vLLM's API server only in how it starts and ends, which clients do not see:

- vLLM is imported once, by a process that does nothing else and uses no device. The server is forked from it, also
  when the engine starts again.
- vLLM's CPU platform and its Ray integration start the engine core as a new Python process, which imports everything
  again, and its worker a third time. Here the engine core is forked from the server, which is small and has no threads
  or device state at that point. With a GPU vLLM's own choice applies: it forks unless CUDA is already in use.
- The model's class is imported once. vLLM inspects it in another new Python process to keep CUDA out of this one,
  which a CPU does not need.
- When the engine core dies, the server exits before it answers any of the core's requests, so that the caller can
  distinguish a failed request from a dead engine.
- When the caller dies, its end of the pipe closes and all processes of the engine end at once.
"""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ray_job.engines.engine_process import EXIT_FILE, LIMITS_FILE, PROMPT_RULES_FILE, SOCKET
from ray_job.engines.engine_rules import prompt_rules

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Awaitable, Callable

    import uvicorn

EXIT_ENGINE_DIED: Final = 70
KEEP_ALIVE_S: Final = 86_400
SERVER_ERROR: Final = 500
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


def main() -> None:
    """Run the command line."""
    # Otherwise vLLM's CPU platform starts a second process for the "uni" executor. The engine core still runs in a
    # separate process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    gc.disable()  # imports allocate much and free nothing: collections are a sixth of their time
    import uvloop

    arguments = import_vllm(sys.argv[2:])
    run_servers(Path(sys.argv[1]), lambda directory: uvloop.run(serve(directory, arguments)))


def import_vllm(options: list[str]) -> "Namespace":
    """Import what the servers and, on a CPU, their engine cores need. Return the parsed options of vLLM."""
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm
    from vllm.platforms import current_platform

    arguments: Namespace = option_parser().parse_args(options)
    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401 - for the engine cores
        from vllm.model_executor.models import ModelRegistry

        # Import the class of the model's architecture here. Architectures that vLLM does not know are left to it.
        file = Path(arguments.model) / "config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
        for architecture in config.get("architectures") or ():
            if (known := ModelRegistry.models.get(architecture)) is not None:
                ModelRegistry.register_model(architecture, known.load_model_cls())
        # It looks at every object of every module, which takes a third of a start: do it once, not in each core.
        if register := getattr(current_platform, "register_triton_kernel_overrides", None):
            register()
            type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    return arguments


def option_parser() -> "ArgumentParser":
    """Return the parser of vLLM's options. It takes whole names only, because those are what the service checks."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # its place before vLLM 0.30
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    parser: ArgumentParser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    return parser


def run_servers(directory: Path, serve: "Callable[[Path], None]") -> None:
    """Run a server in a forked child, and another one for each byte on standard input, until it closes.

    The child's directory, ``directory/N`` for the Nth server, has a file ``exit`` with its exit code once it ended.
    All its processes have ended before the next one starts, so that their memory is free.

    Args:
        directory: it is removed at the end, because a caller that was killed cannot.
        serve: runs the server in its own directory.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # The kernel ends forked children, such as the engine core, when this process exits. Their orphans become
        # children of this process.
        os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # a collection would copy the pages that the child shares
    gc.enable()
    for number in itertools.count(1):
        place = directory / str(number)
        place.mkdir()
        child = os.fork()
        if child == 0:
            _serve_in_child(place, serve)
        os.setpgid(child, child)
        # The child remains a zombie, so its number is not given to another process.
        waiter = threading.Thread(target=_record_exit, args=(child, place), daemon=True)
        waiter.start()
        again = os.read(0, 1)
        os.killpg(child, signal.SIGKILL)
        waiter.join()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-child, 0):
                pass
        if not again:
            break
    shutil.rmtree(directory, ignore_errors=True)


def _serve_in_child(place: Path, serve: "Callable[[Path], None]") -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve(place)
        code = 0
    except SystemExit as end:  # such as vLLM's parser of options
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - the caller reads it in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _record_exit(child: int, place: Path) -> None:
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if end is not None:
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        (place / f"{EXIT_FILE}.new").write_text(str(code))
        (place / f"{EXIT_FILE}.new").rename(place / EXIT_FILE)


async def serve(directory: Path, arguments: "Namespace") -> None:
    """Start the engine and serve vLLM's application. The socket appears when the engine is ready.

    Args:
        directory: place of the socket and of the file of limits.
        arguments: vLLM's options.
    """
    import uvicorn
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM's defaults for throughput: with those of its API server, fewer sequences and shorter steps.
    usage_context = UsageContext.LLM_CLASS
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
            (directory / PROMPT_RULES_FILE).write_bytes(found.to_json())
        limits = {"max_num_seqs": vllm_config.scheduler_config.max_num_seqs}
        (directory / LIMITS_FILE).write_text(json.dumps(limits))
        await uvicorn.Server(server_config(end_with_engine(app, engine), directory / SOCKET)).serve()
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


def server_config(app: Any, socket_path: Path, *, lifespan: Literal["on", "off"] = "on") -> "uvicorn.Config":
    """Return the configuration of the HTTP server.

    Args:
        app: the ASGI application.
        socket_path: the socket to create.
        lifespan: whether the application handles ASGI's lifespan events.
    """
    import uvicorn

    return uvicorn.Config(
        app,
        uds=str(socket_path),
        access_log=False,
        log_level="warning",
        lifespan=lifespan,
        # uvicorn closes idle connections after 5 s and aiohttp after 15 s. The caller would post on closed ones.
        timeout_keep_alive=KEEP_ALIVE_S,
    )


if __name__ == "__main__":
    main()
