"""A stand-in for a Kubernetes API server with KubeRay's operator, fast enough for tests of a few milliseconds.

It is neither Kubernetes nor KubeRay. Over real HTTP it answers the launcher's requests about RayJobs, Secrets and pods
by the rules of the API server: a name is accepted once (409), a missing object is a 404, every change has a new
``resourceVersion``, a watch continues from a version or ends with 410 if that version has expired, and a deleted object
exists until its dependents are gone. Its "operator" takes a RayJob through the states of KubeRay 1.6 without creating a
Ray cluster: once the Secrets of the head's pod exist, it writes them to their mount paths and runs the entrypoint as a
process with the head container's variables. Schemas, admission, roles, garbage
collection and pods are tested on a real cluster.
"""

import copy
import json
import os
import shlex
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

JsonObject = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Cluster:
    """The objects, their history, and the processes that run instead of Ray clusters.

    Attributes:
        pods: the answer to a list of pods.
        requests: the number of requests of each verb.
        refusals: the status and message with which requests of a verb are refused.
        deletions: the propagation policies of the deletions.
        on_create: called with the name of each new RayJob, before the request is answered.
        is_collecting: whether the dependents of a deleted RayJob are deleted; the RayJob stays until then.
    """

    def __init__(self) -> None:
        self.pods: list[JsonObject] = []
        self.requests: Counter[str] = Counter()
        self.refusals: dict[str, tuple[int, str]] = {}
        self.deletions: list[str] = []
        self.on_create: Callable[[str], None] = lambda _: None
        self.is_operator_running = True
        self.is_collecting = True
        self.changed = threading.Condition()
        self.rayjobs: dict[str, JsonObject] = {}
        self.secrets: dict[str, JsonObject] = {}
        self.network_policies: dict[str, JsonObject] = {}
        self.version = 100
        self.history: list[tuple[int, str, JsonObject]] = []
        self.forgotten = 0
        self.is_closing = False
        self.has_owner = False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []

    def create(self, rayjob: JsonObject) -> bool:
        with self.changed:
            name = rayjob["metadata"]["name"]
            if name in self.rayjobs:
                return False
            rayjob["metadata"] |= {"creationTimestamp": now(), "uid": f"uid-{name}"}
            self.rayjobs[name] = rayjob
            self._note("ADDED", rayjob)
        if self.is_operator_running:
            thread = threading.Thread(target=self._operate, args=(name,))
            self._threads.append(thread)
            thread.start()
        self.on_create(name)
        return True

    def put_secret(self, secret: JsonObject, *, replace: bool) -> bool:
        """Create or replace a Secret; return False if it exists or does not, respectively."""
        with self.changed:
            name = secret["metadata"]["name"]
            if (name in self.secrets) != replace:
                return False
            self.secrets[name] = secret
            self.changed.notify_all()
            return True

    def create_network_policy(self, policy: JsonObject) -> bool:
        with self.changed:
            name = policy["metadata"]["name"]
            return self.network_policies.setdefault(name, policy) is policy

    def delete(self, name: str) -> bool:
        with self.changed:
            rayjob = self.rayjobs.get(name)
            if rayjob is None:
                return False
            if "deletionTimestamp" not in rayjob["metadata"]:
                rayjob["metadata"]["deletionTimestamp"] = now()
                self._note("MODIFIED", rayjob)
            process = self._processes.get(name)
            if process is not None and process.poll() is None:
                process.terminate()
            elif self.is_collecting:
                self._remove(name)
        return True

    def set_status(self, name: str, **status: Any) -> None:
        with self.changed:
            rayjob = self.rayjobs[name]
            rayjob["status"] = {**rayjob.get("status", {}), **status}
            self._note("MODIFIED", rayjob)

    def forget_history(self) -> None:
        """Expire all versions, as compaction does: watches cannot continue from an earlier one."""
        with self.changed:
            self.version += 1
            self.forgotten = self.version
            self.history.clear()
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_closing = True
            for process in self._processes.values():
                process.kill()
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(10)

    def _operate(self, name: str) -> None:
        self.set_status(name, jobDeploymentStatus="Initializing", rayClusterName=f"{name}-c1")
        with self.changed:
            rayjob = self.rayjobs[name]
            pod = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
            head = pod["containers"][0]
            variables = {variable["name"]: variable["value"] for variable in head["env"]}
            if not self._mount(pod.get("volumes", ()), head):
                return
            process = subprocess.Popen(
                shlex.split(rayjob["spec"]["entrypoint"]),
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._processes[name] = process
        self.set_status(name, jobDeploymentStatus="Running", jobStatus="RUNNING")
        log = process.communicate()[0].decode()
        with self.changed:
            if self.is_closing or "deletionTimestamp" in rayjob["metadata"]:
                self._remove(name)
            elif process.returncode == 0:
                self.set_status(name, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED", endTime=now())
            else:
                message = f"Job entrypoint command failed with exit code {process.returncode}, last available logs "
                message += f"(truncated to 20,000 chars):\n{log}"
                self.set_status(
                    name,
                    jobDeploymentStatus="Failed",
                    jobStatus="FAILED",
                    reason="AppFailed",
                    message=message,
                    endTime=now(),
                )

    def _mount(self, volumes: Iterable[JsonObject], container: JsonObject) -> bool:
        """Wait for the Secrets of a pod, as a kubelet does, and write their files; return False if all ends."""
        paths = {mount["name"]: Path(mount["mountPath"]) for mount in container.get("volumeMounts", ())}
        for volume in volumes:
            secret = volume["secret"]["secretName"]
            self.changed.wait_for(lambda secret=secret: self.is_closing or secret in self.secrets)
            if self.is_closing:
                return False
            paths[volume["name"]].mkdir(parents=True, exist_ok=True)
            for file, content in self.secrets[secret]["stringData"].items():
                (paths[volume["name"]] / file).write_text(content)
        return True

    def _remove(self, name: str) -> None:
        rayjob = self.rayjobs.pop(name, None)
        if rayjob is not None:
            uid = rayjob["metadata"]["uid"]
            self.secrets = {
                key: each for key, each in self.secrets.items() if each["metadata"]["ownerReferences"][0]["uid"] != uid
            }
            self._note("DELETED", rayjob)

    def _note(self, kind: str, rayjob: JsonObject) -> None:
        self.version += 1
        rayjob["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, copy.deepcopy(rayjob)))
        self.changed.notify_all()


class ApiServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, cluster: Cluster, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cluster = cluster
        self.token = token
        # Ends watches, like a restarted API server.
        self.watches_ended = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ApiServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, cluster = urlsplit(self.path).path.split("/")[-1], self.server.cluster
        verbs = {"secrets": "create secret", "networkpolicies": "create network policy"}
        if self._is_refused(verbs.get(kind, "create")):
            return
        create: dict[str, Callable[[JsonObject], bool]] = {
            "secrets": lambda body: cluster.put_secret(body, replace=False),
            "networkpolicies": cluster.create_network_policy,
        }
        if create.get(kind, cluster.create)(body):
            self._answer(201, body)
        else:
            self._fail(409, "AlreadyExists", f'{kind} "{body["metadata"]["name"]}" already exists')

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused("update secret"):
            return
        if self.server.cluster.put_secret(body, replace=True):
            self._answer(200, body)
        else:
            self._fail(404, "NotFound", f'secrets "{body["metadata"]["name"]}" not found')

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._is_refused("delete"):
            return
        url = urlsplit(self.path)
        name = url.path.split("/")[-1]
        self.server.cluster.deletions += parse_qs(url.query).get("propagationPolicy", [""])
        if self.server.cluster.delete(name):
            self._answer(200, {"kind": "Status", "status": "Success"})
        else:
            self._fail(404, "NotFound", f'rayjobs.ray.io "{name}" not found')

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        *_, kind, name = url.path.split("/")
        cluster = self.server.cluster
        if name == "pods":
            if not self._is_refused("pods"):
                phase = query.get("fieldSelector", "").removeprefix("status.phase=")
                pods = [pod for pod in cluster.pods if pod["status"]["phase"] == phase]
                self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods})
        elif name == "rayjobs" and query.get("watch") in ("true", "True"):
            if not self._is_refused("watch"):
                self._watch(int(query["resourceVersion"]))
        elif name == "rayjobs":
            if not self._is_refused("list"):
                with cluster.changed:
                    items = copy.deepcopy(list(cluster.rayjobs.values()))
                    version = str(cluster.version)
                self._answer(200, {"kind": "RayJobList", "metadata": {"resourceVersion": version}, "items": items})
        elif kind == "configmaps":
            if cluster.has_owner:
                self._answer(200, {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name, "uid": "uid-1"}})
            else:
                self._fail(404, "NotFound", f'configmaps "{name}" not found')
        elif not self._is_refused("get"):
            with cluster.changed:
                found = copy.deepcopy(cluster.rayjobs.get(name))
            if kind == "rayjobs" and found is not None:
                self._answer(200, found)
            else:
                self._fail(404, "NotFound", f'rayjobs.ray.io "{name}" not found')

    def _watch(self, version: int) -> None:
        cluster, ended = self.server.cluster, self.server.watches_ended
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            events = self._events_after(version, ended)
            if cluster.is_closing or self.server.watches_ended > ended:
                break
            if version < cluster.forgotten:
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                self._chunk({"type": "ERROR", "object": status})
                break
            for _, kind, rayjob in events:
                self._chunk({"type": kind, "object": rayjob})
            version = events[-1][0]
        self.wfile.write(b"0\r\n\r\n")

    def _events_after(self, version: int, ended: int) -> list[tuple[int, str, JsonObject]]:
        """Wait for events after a version, or for the end of the watch; return the events."""
        cluster = self.server.cluster
        with cluster.changed:
            cluster.changed.wait_for(
                lambda: (
                    cluster.is_closing
                    or self.server.watches_ended > ended
                    or version < cluster.forgotten
                    or (cluster.history and cluster.history[-1][0] > version)
                )
            )
            return [event for event in cluster.history if event[0] > version]

    def _chunk(self, event: JsonObject) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _is_refused(self, verb: str) -> bool:
        self.server.cluster.requests[verb] += 1
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._fail(401, "Unauthorized", "Unauthorized")
            return True
        if verb in self.server.cluster.refusals:
            status, message = self.server.cluster.refusals[verb]
            self._fail(status, "Refused", message)
            return True
        return False

    def _fail(self, status: int, reason: str, message: str) -> None:
        self._answer(status, {"kind": "Status", "status": "Failure", "reason": reason, "message": message})

    def _answer(self, status: int, body: JsonObject) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def kubernetes_stand_in(token: str) -> Iterator[ApiServer]:
    """Run a cluster with its API server until the context ends."""
    cluster = Cluster()
    with ApiServer(cluster, token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            cluster.close()
            server.shutdown()
            thread.join()


def kubeconfig(server: ApiServer, token: str) -> str:
    """Return a kubeconfig for the stand-in, as JSON, which is also YAML."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": "launcher"}}],
            "clusters": [{"name": "stand-in", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "users": [{"name": "launcher", "user": {"token": token}}],
        }
    )
