"""Every example stack meets the mandatory policies."""

from datetime import date

from infra.policy import refusals, violations
from infra.policy.assessment import EXEMPTIONS
from infra.rendering.manifests import manifests, with_templates
from infra.rendering.recording import Recording
from ray_job.contract.cluster import JOB_TEMPLATES


def test_example_stacks_break_no_mandatory_policy(example: Recording) -> None:
    assert refusals(example, today=date(2030, 1, 1)) == ()


def test_job_templates_are_checked_too(example: Recording) -> None:
    templates = [each for each in with_templates(manifests(example)) if each.template_of]

    has_jobs = any(each.name == JOB_TEMPLATES for each in manifests(example))
    assert {template.kind for template in templates} == ({"RayJob"} if has_jobs else set())


def test_each_exemption_is_used_by_a_stack(example: Recording) -> None:
    components = {each.labels.get("app.kubernetes.io/component") for each in manifests(example)}

    if "device-plugin" in components:
        without = violations(manifests(example), exemptions=())
        assert {found.policy.name for found in without} >= {exemption.policy for exemption in EXEMPTIONS}
