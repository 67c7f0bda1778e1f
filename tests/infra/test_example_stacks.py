"""Every example stack satisfies the invariants."""

from pathlib import Path

import yaml

from infra.policy import violations
from infra.policy.invariants import EXEMPTIONS
from infra.rendering.manifests import manifests, with_templates
from infra.rendering.recording import Recording
from ray_job.contract.cluster import JOB_TEMPLATES


def loses_data(stack_file: Path) -> bool:
    return yaml.safe_load(stack_file.read_text())["config"].get("cloister:keep_data") is False


def test_only_stacks_that_may_lose_data_break_an_invariant(stack_file: Path, example: Recording) -> None:
    allowed = {"data_is_kept"} if loses_data(stack_file) else set()

    found = violations(manifests(example))

    assert [str(violation) for violation in found if violation.invariant not in allowed] == []


def test_job_templates_are_checked_too(example: Recording) -> None:
    templates = [each for each in with_templates(manifests(example)) if each.template_of]

    has_jobs = any(each.name == JOB_TEMPLATES for each in manifests(example))
    assert {template.kind for template in templates} == ({"RayJob"} if has_jobs else set())


def test_each_exemption_is_used_by_a_stack(example: Recording) -> None:
    components = {each.labels.get("app.kubernetes.io/component") for each in manifests(example)}

    if "device-plugin" in components:
        without = violations(manifests(example), exemptions=())
        assert {found.invariant for found in without} >= {exemption.invariant for exemption in EXEMPTIONS}
