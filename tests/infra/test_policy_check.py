"""The program refuses a stack that breaks a mandatory policy, before it registers a resource."""

import json
from collections.abc import Mapping
from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pulumi import RunError

from infra import program
from infra.policy import refusals
from infra.policy.__main__ import recording_of
from infra.policy.facts import PolicyException
from infra.rendering.recording import Recording, record
from infra.rendering.render import main
from infra.stack_file.reading import read_stack_file
from tests.infra.mutations import red
from tests.infra.previewed_stacks import PLATFORMS, ROOT, changed, preview, preview_values, stack_text

TODAY = date(2030, 1, 1)


def run(values: Mapping[str, Any], name: str = "air-gap") -> Recording:
    config = {
        f"cloister:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
    secret_keys = frozenset(f"cloister:{key}" for key in stack_text(name).secret_keys)
    return record(program.run, config=config, secret_keys=secret_keys, stack="dev", references=PLATFORMS)


def exception(**values: Any) -> dict[str, Any]:
    given = {"policy": "CLO-IMG-002", "resource": "*", "reason": "moving", "owner": "me", "expires": "2999-12-31"}
    return given | values


@pytest.mark.parametrize("name", ["air-gap", "customer-acme", "platform"])
def test_program_registers_the_same_resources_after_its_check(name: str) -> None:
    checked = run(stack_text(name).values, name)
    assert {each.urn for each in checked.resources} == {
        each.urn.replace(f":{name}::", ":dev::", 1) for each in preview(name).resources
    }


def test_stack_that_breaks_policies_is_refused_with_all_problems() -> None:
    values = changed("air-gap", policy={"registries": ["registry.other.example"], "max_retention_days": 3})

    with pytest.raises(RunError) as refused:
        run(values)

    message = str(refused.value)
    assert "nothing was changed" in message
    assert "CLO-IMG-002 Deployment cloister-umbra-prod/api: the image 'registry.umbra.example/" in message
    assert "CLO-DATA-005" in message
    assert "Add the registry to policy.registries" in message


def test_refused_stack_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed: list[object] = []
    monkeypatch.setattr(program, "deploy", lambda config: deployed.append(config) or {})
    monkeypatch.setattr(program, "refusals", lambda *_args, **_options: ("CLO-POD-001",))

    with pytest.raises(RunError, match="CLO-POD-001"):
        run(stack_text("air-gap").values)

    assert len(deployed) == 1  # by the recorder


def test_exception_covers_its_resources_until_its_last_day() -> None:
    policy = {"registries": ["registry.other.example"], "exceptions": [exception()]}
    recording = preview_values(changed("air-gap", policy=policy), stack_text("air-gap").secret_keys)
    last = date(2999, 12, 31)

    assert refusals(recording, today=last) == ()
    late = refusals(recording, today=last + timedelta(days=1))
    assert "policy.exceptions: the exception to CLO-IMG-002 for * expired on 2999-12-31" in late[0]
    assert any(line.startswith("CLO-IMG-002 Deployment") for line in late)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (exception(policy="CLO-IMG-999"), "there is no policy CLO-IMG-999"),
        (exception(policy="CLO-SEC-002"), "CLO-SEC-002 has no exceptions"),
        (exception(resource="Deployment other/*"), "CLO-IMG-002 Deployment cloister-umbra-prod/api"),
    ],
)
def test_exception_that_covers_nothing_is_refused(given: dict[str, Any], problem: str) -> None:
    policy = {"registries": ["registry.other.example"], "exceptions": [given]}
    recording = preview_values(changed("air-gap", policy=policy), stack_text("air-gap").secret_keys)

    assert any(problem in line for line in refusals(recording, today=TODAY))


@pytest.mark.parametrize("expires", ["2030-1-1", "tomorrow", "2030-01-31 12:00"])
def test_day_of_an_exception_is_checked(expires: str) -> None:
    values = changed("air-gap", policy={"exceptions": [exception(expires=expires)]})
    with pytest.raises(RunError, match=r"policy.exceptions\[0\].expires: must be a day"):
        preview_values(values, stack_text("air-gap").secret_keys)


def test_day_without_quotes_is_read_as_text(tmp_path: Any) -> None:
    path = tmp_path / "Pulumi.dev.yaml"
    path.write_text("config:\n  cloister:policy: {exceptions: [{expires: 2030-01-31}]}\n")
    assert read_stack_file(path).values["policy"] == {"exceptions": [{"expires": "2030-01-31"}]}


def test_render_prints_all_problems_and_writes_nothing(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/stacks/Pulumi.air-gap.yaml").read_text()
    path = tmp_path / "Pulumi.bad.yaml"
    path.write_text(f"{text}  cloister:policy: {{registries: [registry.other.example]}}\n")

    assert main(["--stack", str(path), "--out", str(tmp_path / "out")]) == 1

    found = capsys.readouterr().err
    assert "CLO-IMG-002 Deployment cloister-umbra-prod/api" in found
    assert "CLO-IMG-002 Deployment cloister-umbra-prod/reconciler" in found
    assert not (tmp_path / "out").exists()


def test_settings_that_accept_problems_are_exceptions() -> None:
    facts = [each for each in preview("customer-acme").resources if each.type.endswith(":StackFacts")]
    reasons = [PolicyException.model_validate(each).reason for each in facts[0].inputs["exceptions"]]
    assert reasons == [
        "set in the stack file: transport.allow_clear_text: database",
        "set in the stack file: transport.allow_clear_text: object_store",
        "set in the stack file: durability.allow_single_copy: database",
        "set in the stack file: durability.allow_single_copy: object_store",
    ]


@pytest.mark.parametrize("name", ["air-gap", "bare-hosts"])
def test_policy_pack_has_the_same_findings(name: str) -> None:
    recording = preview(name)
    resources = [
        SimpleNamespace(
            resource_type=each.type,
            name=each.name,
            urn=each.urn,
            props=each.inputs,
            opts=SimpleNamespace(protect=each.protect),
        )
        for each in recording.resources
    ]
    assert red(recording_of(resources)) == red(recording)
