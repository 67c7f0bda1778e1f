"""OSCAL 1.1.2 documents of an assessment: assessment results and a component definition.

Source: https://pages.nist.gov/OSCAL-Reference/models/v1.1.2/. Ids are derived from the stack, so that two reports of
one stack can be compared.
"""

import re
import uuid
from typing import Any, Final

from infra.evidence.content import Content

VERSION: Final = "1.1.2"
_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "https://cloister.dev/evidence")
_PROPERTIES: Final = "https://cloister.dev/ns/oscal"
_NIST: Final = "NIST SP 800-53 "
_NIST_CATALOG: Final = (
    "https://raw.githubusercontent.com/usnistgov/oscal-content/main/nist.gov/SP800-53/rev5/json/"
    "NIST_SP-800-53_rev5_catalog.json"
)


def assessment_results(content: Content) -> dict[str, Any]:
    """Return the assessment results: an observation for each policy, and a finding for each that applies."""
    stack = content["stack"]["name"]
    policies = content["policies"]
    plan = _id(stack, "plan")
    result = {
        "uuid": _id(stack, "result"),
        "title": f"Policies of the stack {stack}",
        "description": f"Examination of the {content['stack']['source']}. Checks of a running cluster were not run.",
        "start": content["stack"]["assessed_at"],
        "reviewed-controls": {"control-selections": [{"description": "The policies of cloister.", "include-all": {}}]},
        "observations": [_observation(stack, each, content["stack"]["assessed_at"]) for each in policies],
        "findings": [_finding(stack, each) for each in policies if each["status"] != "not applicable"],
    }
    resource = {
        "uuid": plan,
        "title": "Policies",
        "description": "The catalogue of policies is the plan of the assessment.",
        "rlinks": [{"href": "policies.md"}],
    }
    return {
        "assessment-results": {
            "uuid": _id(stack, "assessment-results"),
            "metadata": _metadata(content, f"Assessment of the stack {stack}"),
            "import-ap": {"href": f"#{plan}"},
            "results": [result],
            "back-matter": {"resources": [resource]},
        }
    }


def component_definition(content: Content) -> dict[str, Any]:
    """Return the component definition: the controls of NIST SP 800-53 that policies support."""
    stack = content["stack"]["name"]
    by_control: dict[str, list[dict[str, Any]]] = {}
    for policy in content["policies"]:
        for reference in policy["references"]:
            if reference.startswith(_NIST):
                by_control.setdefault(_control_id(reference.removeprefix(_NIST)), []).append(policy)
    requirements = [
        {
            "uuid": _id(stack, f"requirement {control}"),
            "control-id": control,
            "description": " ".join(f"{each['id']}: {each['title']}" for each in policies),
            "props": [_property("policy", each["id"]) for each in policies],
        }
        for control, policies in sorted(by_control.items())
    ]
    component = {
        "uuid": _id(stack, "component"),
        "type": "service",
        "title": f"cloister, stack {stack}",
        "description": "A private, OpenAI-compatible service for batches of LLM requests.",
        "control-implementations": [
            {
                "uuid": _id(stack, "implementation"),
                "source": _NIST_CATALOG,
                "description": "Controls that the policies of the stack support.",
                "implemented-requirements": requirements,
            }
        ],
    }
    return {
        "component-definition": {
            "uuid": _id(stack, "component-definition"),
            "metadata": _metadata(content, f"Components of the stack {stack}"),
            "components": [component],
        }
    }


def _metadata(content: Content, title: str) -> dict[str, str]:
    at = content["stack"]["assessed_at"]
    return {"title": title, "last-modified": at, "version": at, "oscal-version": VERSION}


def _observation(stack: str, policy: dict[str, Any], at: str) -> dict[str, Any]:
    proofs = [f"{each['resource']}: {each['property']} = {each['value']}" for each in policy["proofs"]]
    problems = [f"{each['resource']}: {each['problem']}" for each in (*policy["problems"], *policy["accepted"])]
    evidence = [{"description": each} for each in (*problems, *proofs)]
    return {
        "uuid": _id(stack, f"observation {policy['id']}"),
        "title": policy["id"],
        "description": policy["title"],
        "props": [_property("severity", policy["severity"]), _property("status", policy["status"].replace(" ", "-"))],
        "methods": ["EXAMINE"],
        "collected": at,
        **({"relevant-evidence": evidence} if evidence else {}),
    }


def _finding(stack: str, policy: dict[str, Any]) -> dict[str, Any]:
    state = "not-satisfied" if policy["status"] == "not met" else "satisfied"
    reason = {"reason": "other", "remarks": "An exception accepts the problems."} if policy["accepted"] else {}
    return {
        "uuid": _id(stack, f"finding {policy['id']}"),
        "title": policy["id"],
        "description": policy["title"],
        "target": {"type": "objective-id", "target-id": policy["id"], "status": {"state": state, **reason}},
        "related-observations": [{"observation-uuid": _id(stack, f"observation {policy['id']}")}],
    }


def _property(name: str, value: str) -> dict[str, str]:
    return {"name": name, "ns": _PROPERTIES, "value": value}


def _control_id(control: str) -> str:
    """Return a control as NIST's catalog names it: ``SC-7(5)`` is ``sc-7.5``."""
    return re.sub(r"\((\d+)\)", r".\1", control).lower()


def _id(stack: str, name: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{stack}/{name}"))
