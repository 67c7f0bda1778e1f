"""Recorder of Pulumi programs."""

import socket
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
import pytest
from pytest_socket import SocketBlockedError

from infra.rendering.recording import record


def config_map(name: str, data: Any, opts: pulumi.ResourceOptions | None = None) -> k8s.core.v1.ConfigMap:
    metadata = k8s.meta.v1.ObjectMetaArgs(name=name, namespace="acme")
    return k8s.core.v1.ConfigMap(name, metadata=metadata, data=data, opts=opts)


def test_resource_is_recorded_with_kubernetes_field_names() -> None:
    def program() -> None:
        k8s.core.v1.Secret("keys", metadata={"name": "keys"}, string_data={"a": "b"}, type="Opaque")

    [secret] = record(program).resources

    assert (secret.type, secret.name) == ("kubernetes:core/v1:Secret", "keys")
    assert secret.inputs["stringData"] == {"a": "b"}


def test_secrets_are_recorded_in_plain_text_with_their_paths() -> None:
    recording = record(lambda: config_map("keys", {"open": "1", "closed": pulumi.Output.secret("2")}) and None)

    [resource] = recording.resources
    assert resource.inputs["data"] == {"open": "1", "closed": "2"}
    assert resource.secrets == {("data", "closed")}
    assert resource.is_secret(("data", "closed"))
    assert not resource.is_secret(("data", "open"))


def test_options_and_outputs_are_recorded() -> None:
    def program() -> None:
        first = config_map("first", {"a": "1"}, pulumi.ResourceOptions(protect=True, retain_on_delete=True))
        config_map("second", {"a": first.metadata["name"]}, pulumi.ResourceOptions(depends_on=[first]))
        pulumi.export("name", first.metadata["name"])
        pulumi.export("id", pulumi.Output.secret(first.id))

    recording = record(program)

    first, second = recording.named("first"), recording.named("second")
    assert (first.protect, first.retain_on_delete, second.protect) == (True, True, False)
    assert second.inputs["data"] == {"a": "first"}
    assert second.dependencies == (first.urn,)
    assert recording.outputs == {"name": "first", "id": "acme/first"}
    assert recording.secret_outputs == {("id",)}


def test_runs_are_independent() -> None:
    def program() -> None:
        pulumi.export("customer", pulumi.Config().get("customer"))
        pulumi.export("stack", pulumi.get_stack())

    first = record(program, config={"cloister:customer": "acme"}, stack="acme-dev")
    second = record(program)

    assert first.outputs == {"customer": "acme", "stack": "acme-dev"}
    assert second.outputs["stack"] == "test"
    assert second.outputs.get("customer") is None


def test_secret_configuration_stays_secret() -> None:
    def program() -> None:
        pulumi.export("key", pulumi.Config().require_secret("key"))

    recording = record(program, config={"cloister:key": "s3cret"}, secret_keys=frozenset({"cloister:key"}))

    assert recording.outputs == {"key": "s3cret"}
    assert recording.secret_outputs == {("key",)}


def test_error_of_the_program_reaches_the_caller() -> None:
    def program() -> None:
        config_map("first", {"a": pulumi.Output.from_input("1").apply(lambda text: str(1 // (int(text) - 1)))})

    with pytest.raises(ZeroDivisionError):
        record(program)


def test_read_of_a_cluster_is_rejected() -> None:
    with pytest.raises(Exception, match="needs a cluster"):
        record(lambda: k8s.core.v1.ConfigMap.get("there", "acme/there") and None)


def test_network_is_disabled() -> None:
    with pytest.warns(UserWarning, match="socket"), pytest.raises(SocketBlockedError):
        socket.socket(socket.AF_INET)
