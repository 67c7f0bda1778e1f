"""The inside of a stack: checks that run in a pod with the service's settings, and their relay by kubectl."""

import ipaddress
import json
import shlex
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict

from ray_job.contract.cluster import API, API_SERVICE_PORT
from service.db.login import libpq_url
from service.doctor.backends import check_database, check_launcher, check_object_store
from service.doctor.findings import Finding, Result, run_check
from service.errors import SettingsError
from service.model_catalogue import Catalogue, load_catalogue
from service.settings import Settings, read_settings
from service.unsafe_engine_args import UNSAFE

_CONNECT_TIMEOUT_S: Final = 3.0
_METADATA: Final = "169.254.169.254"
_KUBERNETES: Final = "kubernetes.default.svc"
_RELAY: Final = "doctor in the pod"
_RELAY_TIMEOUT_S: Final = 600.0
_MAX_REASON: Final = 500
_COMPLETE: Final = (0, 1)


def check_pod(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Run all checks that need the service's settings, one after the other.

    Args:
        environment: the variables of the process.
    """
    try:
        settings = read_settings(environment)
    except SettingsError as error:
        yield Finding.failed("settings", "; ".join(each.strip() for each in str(error).splitlines()))
        yield Finding.not_checked("everything else in a pod", "it needs the settings")
        return
    yield from run_check("DNS", check_names, settings, environment)
    yield from run_check("database", check_database, settings)
    yield from run_check("object store", check_object_store, settings)
    try:
        catalogue = load_catalogue(settings.models_path)
    except SettingsError as error:
        yield Finding.failed("models", f"CLOISTER_MODELS: {error}")
    else:
        yield from check_models(catalogue)
        yield from run_check("launcher", check_launcher, settings, catalogue, environment)
    yield from run_check("network policies", check_enforcement, environment)


def check_models(catalogue: Catalogue) -> Iterator[Finding]:
    """List the models, and warn of each unsafe engine argument that a model acknowledges.

    Args:
        catalogue: the model catalogue.
    """
    yield Finding.ok("models", ", ".join(catalogue))
    for model in catalogue.values():
        for name in model.unsafe_engine_args:
            yield Finding.warning(f"engine arguments of {model.id}", f"{name} is set: it {UNSAFE[name]}")


def check_names(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Resolve the host names in the settings.

    Args:
        settings: the settings of the service.
        environment: the variables of the process.
    """
    hosts: dict[str, str] = {}
    for host in str(conninfo_to_dict(libpq_url(settings.database_url)).get("host") or "").split(","):
        hosts[host] = "CLOISTER_DATABASE_URL"
    hosts[urlsplit(settings.coordinator_url).hostname or ""] = "CLOISTER_COORDINATOR_URL"
    hosts[urlsplit(settings.object_store.endpoint_url).hostname or ""] = "CLOISTER_OBJECT_STORE"
    if "KUBERNETES_SERVICE_HOST" in environment:
        hosts[_KUBERNETES] = "the Kubernetes API"
    for host, variable in hosts.items():
        try:
            is_address = host.startswith("/") or not host or bool(ipaddress.ip_address(host))
        except ValueError:
            is_address = False
        if is_address:
            continue
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a valid name"
            yield Finding.failed(
                "DNS",
                f"{host} ({variable}): {reason}. Check that the name is right, that the cluster's DNS runs in "
                "`network.dns_namespace`, and that a DNS cache on the nodes is in `network.dns_networks`",
            )
        else:
            addresses = ", ".join(sorted({str(each[4][0]) for each in found}))
            yield Finding.ok("DNS", f"{host} ({variable}) is {addresses}")


def check_enforcement(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the network policies are enforced, by connections that they block. No data is sent.

    The policies allow the reconciler to reach the Kubernetes API, but not the API's pods; and the reverse for the API.
    """
    server = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not server:
        yield Finding.not_checked(
            "network policies", "this is not a pod of a cluster (KUBERNETES_SERVICE_HOST is not set)"
        )
        return
    if environment.get("CLOISTER_LAUNCHER"):
        yield check_blocked(f"the Service {API}", API, API_SERVICE_PORT, if_closed="none of its pods is ready")
    else:
        yield check_blocked(
            "the Kubernetes API",
            server,
            int(environment.get("KUBERNETES_SERVICE_PORT", "443")),
            if_open="the API server runs on this pod's node, and no policy can block the own node",
        )
    yield check_blocked("the cloud's metadata service", _METADATA, 80, if_closed="this is not a cloud")


def check_blocked(
    name: str,
    host: str,
    port: int,
    *,
    if_open: str = "",
    if_closed: str = "",
    timeout_s: float = _CONNECT_TIMEOUT_S,
) -> Finding:
    """Try a TCP connection that the network policies block for this pod.

    Args:
        name: what answers there.
        host: its name or address.
        port: its port.
        if_open: another explanation of an open connection than policies that are not enforced.
        if_closed: another explanation of a closed connection than an enforced policy; empty if there is none.
        timeout_s: the time limit, in seconds.
    """
    check, where = "network policies", f"{name} at {host}:{port}"
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except (socket.gaierror, UnicodeError):
        return Finding.not_checked(check, f"the name {host} has no address: see the findings on DNS")
    except OSError as error:  # refused at once, no answer in time, no route, or not permitted
        if if_closed and isinstance(error, ConnectionRefusedError):
            return Finding.not_checked(check, f"{where} refuses at once: because of a policy, or {if_closed}")
        otherwise = f" (or {if_closed})" if if_closed else ""
        return Finding.ok(check, f"{where} is unreachable, as the policies demand{otherwise}")
    otherwise = f" (or {if_open})" if if_open else ""
    return Finding.failed(
        check,
        f"network policies are not enforced: this pod reaches {where}, which they block{otherwise}. Use a network "
        "plugin that enforces NetworkPolicy, or enable it",
    )


def relay(command: Sequence[str], *, timeout_s: float = _RELAY_TIMEOUT_S) -> Iterator[Finding]:
    """Yield the findings of a doctor in a pod as they arrive, and a failure if its report is incomplete.

    Args:
        command: the command that runs it.
        timeout_s: the time limit, in seconds.
    """
    count, is_done = 0, False
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )
        except OSError as error:
            yield Finding.failed(_RELAY, f"cannot run {command[0]}: {error.strerror}")
            return
        timer = threading.Timer(timeout_s, process.kill)
        timer.daemon = True  # Ctrl-C does not wait for it
        timer.start()
        try:
            with process:
                for line in process.stdout or ():
                    try:
                        record = json.loads(line)
                        is_done = is_done or (isinstance(record, dict) and "done" in record)
                        finding = Finding(record["check"], Result(record["result"]), record["message"])
                    except (ValueError, KeyError, TypeError):
                        continue  # the counts, a line that was cut off, or the output of another program
                    count += 1
                    yield finding
        finally:
            timer.cancel()
        errors.seek(0)
        reason = " ".join(errors.read().split())[-_MAX_REASON:]
    if not count and "(NotFound)" in reason:
        yield Finding.not_checked("stack", f"{reason}: `pulumi up` creates it")
    elif not (is_done and process.returncode in _COMPLETE):
        yield Finding.failed(
            _RELAY,
            f"`{shlex.join(command)}` ended early, with {process.returncode}: {reason or 'no reason given'}. The "
            f"missing checks did not run (137: the pod ran out of memory; -9: it took longer than {timeout_s:.0f} s)",
        )
