"""Stand-in for the `command` provider, for machines without the binary `pulumi-resource-command`.

It connects Pulumi's real engine to real SSH servers by the ssh client of this machine. It follows version 1.2.1 of the
real provider (https://github.com/pulumi/pulumi-command, provider/pkg/provider/remote) for the inputs that the program
sets: a host key is required to match, standard input goes to the command, a failed command's output is in the error,
a failed create is not in the state, a change of any input runs ``update``.
"""

import contextlib
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import empty_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

from tests.cluster.provider_values import Secret, differences, from_struct, has_unknown, revealed, to_struct

VERSION: Final = "1.2.1"


class CommandProvider(provider_pb2_grpc.ResourceProviderServicer):
    """Methods of the protocol, under gRPC's names."""

    def Handshake(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return provider_pb2.ProviderHandshakeResponse(accept_secrets=True, accept_resources=False, accept_outputs=False)

    def GetPluginInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return plugin_pb2.PluginInfo(version=VERSION)

    def Attach(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return empty_pb2.Empty()

    def Cancel(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return empty_pb2.Empty()

    def CheckConfig(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return provider_pb2.DiffResponse(changes=provider_pb2.DiffResponse.DIFF_NONE)

    def Configure(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return provider_pb2.ConfigureResponse(
            acceptSecrets=True, supportsPreview=True, acceptResources=False, acceptOutputs=False
        )

    def Check(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return provider_pb2.CheckResponse(inputs=request.news)

    def Diff(self, request: Any, _context: Any) -> Any:  # noqa: N802
        changes = differences(revealed(from_struct(request.old_inputs)), revealed(from_struct(request.news)))
        kinds = provider_pb2.DiffResponse
        return kinds(changes=kinds.DIFF_SOME if changes else kinds.DIFF_NONE, diffs=sorted(changes))

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.properties)
        outputs = inputs if request.preview else self._run(context, request.urn, inputs, "create")
        return provider_pb2.CreateResponse(id=secrets.token_hex(4), properties=to_struct(outputs))

    def Update(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.news)
        before = {key: value for key, value in from_struct(request.olds).items() if key in {"stdout", "stderr"}}
        is_known = not has_unknown(inputs)
        outputs = before | (
            inputs if request.preview or not is_known else self._run(context, request.urn, inputs, "update")
        )
        return provider_pb2.UpdateResponse(properties=to_struct(outputs))

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        state = from_struct(request.properties)
        if state.get("delete"):
            self._run(context, request.urn, state, "delete")
        return empty_pb2.Empty()

    def _run(self, context: Any, urn: str, inputs: Mapping[str, Any], action: str) -> dict[str, Any]:
        """Run one action on the host; return the outputs."""
        plain = revealed(dict(inputs))
        with _ssh_options(plain["connection"]) as (options, target):
            if "remotePath" in plain:
                command, stdin = _copying(plain["source"]["path"], plain["remotePath"])
            else:
                command, stdin = plain[action], plain.get("stdin", "").encode()
            done = subprocess.run(["ssh", *options, target, command], input=stdin, capture_output=True, check=False)
        if done.returncode:
            output = (done.stdout + done.stderr).decode()
            context.abort(
                grpc.StatusCode.UNKNOWN, f"exit status {done.returncode}: running {command!r}:\n{output}: {urn}"
            )
        outputs = {"stdout": Secret(done.stdout.decode().removesuffix("\n")), "stderr": done.stderr.decode()}
        return {**inputs, **outputs} if "remotePath" not in plain else dict(inputs)


def _copying(source: str, path: str) -> tuple[str, bytes]:
    quoted = shlex.quote(path)
    return f"mkdir -p {shlex.quote(str(Path(path).parent))} && cat >{quoted}", Path(source).read_bytes()


@contextlib.contextmanager
def _ssh_options(connection: Mapping[str, Any]) -> Iterator[tuple[list[str], str]]:
    with tempfile.TemporaryDirectory() as directory:
        known, key = Path(directory) / "known", Path(directory) / "key"
        port = connection.get("port", 22)
        known.write_text(f"{connection['host']} {connection['hostKey']}\n")
        key.write_text(connection["privateKey"])
        key.chmod(0o600)
        settings = {
            "BatchMode": "yes",
            "HostKeyAlias": connection["host"],
            "HostKeyAlgorithms": connection["hostKey"].split()[0],
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(known),
        }
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        target = f"{connection['user']}@{connection['host']}"
        yield ["-F", "none", *options, "-i", str(key), "-p", str(port)], target


@contextlib.contextmanager
def command_provider() -> Iterator[int]:
    """Serve the stand-in; yield its port, for ``PULUMI_DEBUG_PROVIDERS=command:<port>``."""
    server = grpc.server(ThreadPoolExecutor(max_workers=16))
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(CommandProvider(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(grace=2).wait()
