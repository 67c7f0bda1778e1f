"""Findings on a cluster that has defects or does not answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.rayjobs import FINGERPRINT_ANNOTATION, model_fingerprint, template_key
from service.model_catalogue import load_catalogue
from tests.contract.kubernetes_stand_in import kubeconfig as stand_in_kubeconfig
from tests.contract.kubernetes_stand_in import kubernetes_stand_in
from tests.integration.doctor.doctor_run import Doctor, http_server


def test_unknown_context_is_reported_with_the_existing_ones(doctor: Doctor, tmp_path: Path) -> None:
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
        run = doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--context", "nope", "--only", "cluster")
    assert run["kubeconfig"].endswith("it has no context 'nope'. It has: stand-in")
    assert "there is no such file" in doctor("--kubeconfig", "/nowhere", "--only", "cluster")["kubeconfig"]


def kubeconfig(server: str, **changed: Any) -> str:
    """Return a kubeconfig without a login, as JSON, which is valid YAML."""
    context = {"name": "factory", "context": {"cluster": "factory", "user": "nobody"}}
    clusters = [{"name": "factory", "cluster": {"server": server, **changed.pop("cluster", {})}}]
    whole = {"current-context": "factory", "contexts": [context], "clusters": clusters, "users": []}
    return json.dumps(whole | changed)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [secret-value", "cannot be read as a kubeconfig (ParserError)"),
        ("[secret-value]", "cannot be read as a kubeconfig (TypeError)"),
        ("secret-value", "cannot be read as a kubeconfig (TypeError)"),
        (kubeconfig("https://10.0.0.1", cluster={"certificate-authority-data": "a"}), "its context is invalid"),
        (kubeconfig("", **{"current-context": ""}), "name one with --context. It has: factory"),
    ],
)
def test_invalid_kubeconfig_is_reported_without_its_content(
    doctor: Doctor, tmp_path: Path, content: str, expected: str
) -> None:
    (tmp_path / "kubeconfig").write_text(content)
    run = doctor("--kubeconfig", str(tmp_path / "kubeconfig"))
    assert expected in run["kubeconfig"]
    assert "secret-value" not in run.out
    assert run.results["API"] == "not_checked"  # the other viewpoints still run


class Kubernetes:
    """An API server that allows everything and only has the objects that a test adds."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {"/version": (200, {"gitVersion": "v1.33.1"})}

    def __call__(self, verb: str, path: str) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path in self.answers:
            return self.answers[path]
        if verb == "POST":
            return 201, {"status": {"allowed": True}}
        return 200, {"metadata": {}, "items": []}


SERVICE = "cloister-acme-dev"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@pytest.fixture
def look(doctor: Doctor, tmp_path: Path) -> Callable[[Kubernetes], Any]:
    """Run the cluster's checks on an API server."""

    def run(kubernetes: Kubernetes) -> Any:
        with http_server(kubernetes) as server:
            (tmp_path / "kubeconfig").write_text(kubeconfig(server))
            return doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--namespace", SERVICE, "--only", "cluster")

    return run


def test_anonymous_user_is_a_failure(look: Callable[[Kubernetes], Any]) -> None:
    kubernetes = Kubernetes()
    kubernetes.answers[REVIEWS] = (403, {"message": 'User "system:anonymous" cannot create resource'})
    run = look(kubernetes)
    assert run.code == 1
    assert run["login"].startswith("failed: the API server does not know this user: log in")


def test_expired_login_is_reported(look: Callable[[Kubernetes], Any]) -> None:
    kubernetes = Kubernetes()
    kubernetes.answers["/version"] = (401, {"message": "Unauthorized"})
    assert "log in again" in look(kubernetes)["everything else in the cluster"]


@pytest.mark.parametrize(
    ("version", "result"),
    [("v1.30.0", "ok"), ("v1.35.3+k3s1", "ok"), ("v1.29.9", "failed"), ("v0.0.0-master", "not_checked")],
)
def test_version_of_kubernetes(look: Callable[[Kubernetes], Any], version: str, result: str) -> None:
    kubernetes = Kubernetes()
    kubernetes.answers["/version"] = (200, {"gitVersion": version})
    assert look(kubernetes).results["Kubernetes"] == result


def test_missing_deployments_are_failures(look: Callable[[Kubernetes], Any]) -> None:
    run = look(Kubernetes())
    assert run["Deployment reconciler"].startswith(f"failed: it is not in {SERVICE}")
    assert run["Deployment coordinator"].startswith(f"failed: it is not in {SERVICE}")
    assert run["Deployment api"].startswith(f"failed: it is not in {SERVICE}")


def test_failing_metrics_are_reported_with_the_reason(
    look: Callable[[Kubernetes], Any],
) -> None:
    kubernetes = Kubernetes()
    kubernetes.answers["/apis/metrics.k8s.io/v1beta1/nodes"] = (503, {"message": "the server is overloaded"})
    found = look(kubernetes)["metrics"]
    assert "the server is overloaded" in found
    assert "Install" not in found
    kubernetes.answers["/apis/metrics.k8s.io/v1beta1/nodes"] = (404, {"message": "not found"})
    assert look(kubernetes)["metrics"].endswith("Install metrics-server")


@pytest.mark.parametrize("text", ["{", "[]", '{"spec": {}}'])
def test_invalid_job_template_is_reported(look: Callable[[Kubernetes], Any], text: str) -> None:
    kubernetes = Kubernetes()
    held = {"metadata": {}, "data": {"demo.json": text}}
    kubernetes.answers[f"/api/v1/namespaces/{SERVICE}/configmaps/ray-job-templates"] = (200, held)
    assert "holds a template that is not a RayJob" in look(kubernetes)["node pools"]


def test_missing_volume_of_models_is_a_failure(look: Callable[[Kubernetes], Any]) -> None:
    kubernetes = Kubernetes()
    volumes = [{"name": "weights", "persistentVolumeClaim": {"claimName": "model-weights"}}, {"name": "shm"}]
    group: dict[str, Any] = {"template": {"spec": {"containers": [], "volumes": volumes}}}
    held = {"metadata": {}, "data": {"demo.json": json.dumps({"spec": {"rayClusterSpec": {"headGroupSpec": group}}})}}
    kubernetes.answers[f"/api/v1/namespaces/{SERVICE}/configmaps/ray-job-templates"] = (200, held)
    assert f"failed: in {SERVICE}-jobs: model-weights (missing)" in look(kubernetes)["volumes of models"]
    bound = {"metadata": {"name": "model-weights"}, "status": {"phase": "Bound"}}
    kubernetes.answers[f"/api/v1/namespaces/{SERVICE}-jobs/persistentvolumeclaims"] = (200, {"items": [bound]})
    assert look(kubernetes)["volumes of models"] == f"ok: in {SERVICE}-jobs: model-weights (Bound)"


def test_unreachable_cluster_is_reported_once(doctor: Doctor, tmp_path: Path) -> None:
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
    run = doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--only", "cluster")
    assert run.results == {"Kubernetes": "failed", "everything else in the cluster": "not_checked"}
    assert "Connection refused" in run["Kubernetes"]


def test_launcher_is_not_checked_if_access_reviews_are_refused(
    doctor: Doctor, settings: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "templates").mkdir()
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
        server.cluster.refusals["create"] = (403, "no")
        settings(
            LAUNCHER="kuberay",
            KUBERNETES_NAMESPACE="jobs",
            RAY_JOB_TEMPLATES=str(tmp_path / "templates"),
            KUBECONFIG=str(tmp_path / "kubeconfig"),
        )
        run = doctor("--only", "pod")
    assert run.results["launcher"] == "not_checked"


def test_unreachable_ray_is_reported(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(LAUNCHER="ray_jobs", RAY_ADDRESS="http://127.0.0.1:9")
    assert doctor()["launcher"].startswith("failed: CLOISTER_RAY_ADDRESS: ")


def test_each_model_has_a_finding_on_its_template(
    doctor: Doctor, settings: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "models.yaml").write_text(
        "models: [{id: without, source: /m}, {id: odd, source: /m}, {id: last, source: /m}]"
    )
    (tmp_path / "templates").mkdir()
    for model in ("odd", "last"):
        spec = load_catalogue(tmp_path / "models.yaml")[model].spec
        metadata = {"namespace": "jobs", "annotations": {FINGERPRINT_ANNOTATION: model_fingerprint(spec)}}
        volume = {"name": "job-token", "secret": {"secretName": "set-by-the-launcher"}}
        group: dict[str, Any] = {"template": {"spec": {"containers": [{}], "volumes": [volume]}}}
        body = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata,
            "spec": {"rayClusterSpec": {"headGroupSpec": group}},
        }
        (tmp_path / "templates" / template_key(model)).write_text(json.dumps(body))
    kubernetes = Kubernetes()
    kubernetes.answers["/apis/ray.io/v1/namespaces/jobs/rayjobs"] = (422, {"message": "spec: Required value"})
    with http_server(kubernetes) as server:
        (tmp_path / "kubeconfig").write_text(kubeconfig(server))
        settings(
            LAUNCHER="kuberay",
            KUBERNETES_NAMESPACE="jobs",
            RAY_JOB_TEMPLATES=str(tmp_path / "templates"),
            KUBECONFIG=str(tmp_path / "kubeconfig"),
        )
        run = doctor("--only", "pod")  # every line of its output is JSON
    assert "has no template for it" in run["RayJob of the model without"]
    assert "422: spec: Required value" in run["RayJob of the model odd"]
    assert "422: spec: Required value" in run["RayJob of the model last"]
