"""vLLM's own API server and a client that posts all lines at once.

Run as ``python -m tests.bench.http_client INPUT OUTPUT [vLLM options]``. The server is a child process on a Unix
socket.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

POLL_S = 0.1


async def answer_all(lines: list[bytes], target: Path, socket: Path, server: "subprocess.Popen[bytes]") -> None:
    """Wait for the server, post every line at once and write each answer when it is complete."""
    async with aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(path=str(socket), limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        while not await is_ready(session):
            if server.poll() is not None:
                raise RuntimeError(f"vLLM's server ended with {server.returncode}")
            await asyncio.sleep(POLL_S)

        async def answer(line: bytes) -> None:
            request = json.loads(line)
            async with session.post(f"http://engine{request['url']}", json=request["body"]) as response:
                body = await response.json()
                if response.status == 200:
                    file.write(json.dumps({"custom_id": request["custom_id"], "usage": body["usage"]}) + "\n")

        with target.open("w", buffering=1) as file:
            await asyncio.gather(*(answer(line) for line in lines))


async def is_ready(session: aiohttp.ClientSession) -> bool:
    """Return whether the server answers."""
    try:
        async with session.get("http://engine/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def main() -> None:
    """Run the server and the client."""
    source, target, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="bench-http-") as directory:
        socket = Path(directory) / "s"
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--uds", str(socket), *options]
        )
        try:
            asyncio.run(answer_all(Path(source).read_bytes().splitlines(), Path(target), socket, server))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
