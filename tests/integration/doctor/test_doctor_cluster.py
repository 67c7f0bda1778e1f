"""What `cloister doctor` finds of a cluster that is not as it should be, or cannot be asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.rayjobs import FINGERPRINT_ANNOTATION, model_fingerprint, template_key
from service.model_catalogue import load_catalogue
from tests.contract.kubernetes_stand_in import kubeconfig as stand_in_kubeconfig
from tests.contract.kubernetes_stand_in import kubernetes_stand_in
from tests.integration.doctor.told import Doctor, answering


def test_a_context_that_is_not_there_is_told_with_those_that_are(doctor: Doctor, tmp_path: Path) -> None:
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
        told = doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--context", "nope", "--only", "cluster")
    assert told["kubeconfig"].endswith("it has no context 'nope'. It has: stand-in")
    assert "there is no such file" in doctor("--kubeconfig", "/nowhere", "--only", "cluster")["kubeconfig"]


def kubeconfig(server: str, **changed: Any) -> str:
    """One whose user has no login, as JSON, which is YAML."""
    context = {"name": "factory", "context": {"cluster": "factory", "user": "nobody"}}
    clusters = [{"name": "factory", "cluster": {"server": server, **changed.pop("cluster", {})}}]
    whole = {"current-context": "factory", "contexts": [context], "clusters": clusters, "users": []}
    return json.dumps(whole | changed)


@pytest.mark.parametrize(
    ("content", "told_of"),
    [
        ("a: [not-to-be-told", "cannot be read as a kubeconfig (ParserError)"),
        ("[not-to-be-told]", "cannot be read as a kubeconfig (TypeError)"),
        ("not-to-be-told", "cannot be read as a kubeconfig (TypeError)"),
        (kubeconfig("https://10.0.0.1", cluster={"certificate-authority-data": "a"}), "something of its context is"),
        (kubeconfig("", **{"current-context": ""}), "name one with --context. It has: factory"),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_told(doctor: Doctor, tmp_path: Path, content: str, told_of: str) -> None:
    (tmp_path / "kubeconfig").write_text(content)
    told = doctor("--kubeconfig", str(tmp_path / "kubeconfig"))
    assert told_of in told["kubeconfig"]
    assert "not-to-be-told" not in told.out
    assert told.results["API"] == "not_checked"  # it goes on


class Kubernetes:
    """Answers as an API server that lets everything be done, and has nothing but what a test puts there."""

    def __init__(self) -> None:
        self.there: dict[str, tuple[int, Any]] = {"/version": (200, {"gitVersion": "v1.33.1"})}

    def __call__(self, verb: str, path: str) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path in self.there:
            return self.there[path]
        if verb == "POST":
            return 201, {"status": {"allowed": True}}
        return 200, {"metadata": {}, "items": []}


SERVICE = "cloister-acme-dev"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@pytest.fixture
def look(doctor: Doctor, tmp_path: Path) -> Callable[[Kubernetes], Any]:
    """What the doctor tells of a cluster."""

    def run(kubernetes: Kubernetes) -> Any:
        with answering(kubernetes) as server:
            (tmp_path / "kubeconfig").write_text(kubeconfig(server))
            return doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--namespace", SERVICE, "--only", "cluster")

    return run


def test_a_user_whom_the_cluster_does_not_know_is_a_failure(look: Callable[[Kubernetes], Any]) -> None:
    kubernetes = Kubernetes()
    kubernetes.there[REVIEWS] = (403, {"message": 'User "system:anonymous" cannot create resource'})
    told = look(kubernetes)
    assert told.code == 1
    assert told["login"].startswith("failed: the API server does not know this user: log in")


def test_a_login_that_has_ended_is_told(look: Callable[[Kubernetes], Any]) -> None:
    kubernetes = Kubernetes()
    kubernetes.there["/version"] = (401, {"message": "Unauthorized"})
    assert "log in anew" in look(kubernetes)["everything else in the cluster"]


def test_a_stack_that_is_half_there_is_told(look: Callable[[Kubernetes], Any]) -> None:
    told = look(Kubernetes())
    assert told["Deployment reconciler"].startswith(f"failed: it is not in {SERVICE}")
    assert told["Deployment api"].startswith(f"failed: it is not in {SERVICE}")


def test_metrics_that_are_installed_and_do_not_answer_are_told_with_the_reason(
    look: Callable[[Kubernetes], Any],
) -> None:
    kubernetes = Kubernetes()
    kubernetes.there["/apis/metrics.k8s.io/v1beta1/nodes"] = (503, {"message": "the server is overloaded"})
    told = look(kubernetes)["metrics"]
    assert "the server is overloaded" in told
    assert "Install" not in told
    kubernetes.there["/apis/metrics.k8s.io/v1beta1/nodes"] = (404, {"message": "not found"})
    assert look(kubernetes)["metrics"].endswith("Install metrics-server")


@pytest.mark.parametrize("text", ["{", "[]", '{"spec": {}}'])
def test_a_template_that_is_none_is_told(look: Callable[[Kubernetes], Any], text: str) -> None:
    kubernetes = Kubernetes()
    held = {"metadata": {}, "data": {"demo.json": text}}
    kubernetes.there[f"/api/v1/namespaces/{SERVICE}/configmaps/ray-job-templates"] = (200, held)
    assert "holds a template that is no RayJob" in look(kubernetes)["node pools"]


def test_a_volume_of_models_that_is_not_there_is_told(look: Callable[[Kubernetes], Any]) -> None:
    kubernetes = Kubernetes()
    volumes = [{"name": "weights", "persistentVolumeClaim": {"claimName": "model-weights"}}, {"name": "shm"}]
    group: dict[str, Any] = {"template": {"spec": {"containers": [], "volumes": volumes}}}
    held = {"metadata": {}, "data": {"demo.json": json.dumps({"spec": {"rayClusterSpec": {"headGroupSpec": group}}})}}
    kubernetes.there[f"/api/v1/namespaces/{SERVICE}/configmaps/ray-job-templates"] = (200, held)
    assert f"failed: in {SERVICE}-jobs: model-weights (missing)" in look(kubernetes)["volumes of models"]
    bound = {"metadata": {"name": "model-weights"}, "status": {"phase": "Bound"}}
    kubernetes.there[f"/api/v1/namespaces/{SERVICE}-jobs/persistentvolumeclaims"] = (200, {"items": [bound]})
    assert look(kubernetes)["volumes of models"] == f"ok: in {SERVICE}-jobs: model-weights (Bound)"


def test_a_cluster_that_does_not_answer_is_told_once(doctor: Doctor, tmp_path: Path) -> None:
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
    told = doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--only", "cluster")
    assert told.results == {"Kubernetes": "failed", "everything else in the cluster": "not_checked"}
    assert "Connection refused" in told["Kubernetes"]


def test_rights_that_cannot_even_be_asked_for_are_not_checked(
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
        told = doctor("--only", "pod")
    assert told.results["launcher"] == "not_checked"


def test_a_ray_that_does_not_answer_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(LAUNCHER="ray_jobs", RAY_ADDRESS="http://127.0.0.1:9")
    assert doctor()["launcher"].startswith("failed: CLOISTER_RAY_ADDRESS: ")


def test_each_model_is_told_of_its_own_template(doctor: Doctor, settings: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(
        "models: [{id: without, source: /m}, {id: odd, source: /m}, {id: last, source: /m}]"
    )
    (tmp_path / "templates").mkdir()
    for model in ("odd", "last"):
        spec = load_catalogue(tmp_path / "models.yaml").models[model].spec
        metadata = {"namespace": "jobs", "annotations": {FINGERPRINT_ANNOTATION: model_fingerprint(spec)}}
        group: dict[str, Any] = {"template": {"spec": {"containers": [{}]}}}
        body = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata,
            "spec": {"rayClusterSpec": {"headGroupSpec": group}},
        }
        (tmp_path / "templates" / template_key(model)).write_text(json.dumps(body))
    kubernetes = Kubernetes()
    kubernetes.there["/apis/ray.io/v1/namespaces/jobs/rayjobs"] = (422, {"message": "spec: Required value"})
    with answering(kubernetes) as server:
        (tmp_path / "kubeconfig").write_text(kubeconfig(server))
        settings(
            LAUNCHER="kuberay",
            KUBERNETES_NAMESPACE="jobs",
            RAY_JOB_TEMPLATES=str(tmp_path / "templates"),
            KUBECONFIG=str(tmp_path / "kubeconfig"),
        )
        told = doctor("--only", "pod")  # every line of its output is JSON
    assert "has no template of it" in told["RayJob of the model without"]
    assert "422: spec: Required value" in told["RayJob of the model odd"]
    assert "422: spec: Required value" in told["RayJob of the model last"]
