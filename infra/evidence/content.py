"""Content of a report as plain data, from a recording and its assessment."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from infra.evidence.flows import flows_of
from infra.policy.assessment import EXEMPTIONS, Result, Violation, assess, fields_of
from infra.policy.catalogue import BY_NAME
from infra.policy.facts import facts_of
from infra.policy.pod_checks import images
from infra.rendering.manifests import Manifest, manifests, with_templates
from infra.rendering.recording import Recording

Content = dict[str, Any]
_SHOWN_PROOFS: Final = 20
_LONGEST_VALUE: Final = 200
_SETTINGS: Final = {
    "CLOISTER_RETENTION_DAYS": "files and finished batches are deleted after (days)",
    "CLOISTER_MAX_KEY_DAYS": "API keys expire after (days)",
}
_LIVE_CHECKS: Final = (
    ("connections that network policies refuse", "cloister doctor"),
    ("rights of service accounts", "cloister doctor"),
    ("TLS of database and object store", "cloister doctor"),
    ("rights of the service's database role", "cloister doctor"),
    ("chain of the audit log", "cloister audit verify"),
    ("last restore of a backup", "docs/how-to/back-up-and-restore.md"),
)


def content_of(
    recording: Recording,
    *,
    source: str,
    stack: str,
    now: datetime,
    key_times: Mapping[str, tuple[str, str]],
    made_by_charts: int = 0,
) -> Content:
    """Return the content of a report.

    Args:
        recording: the resources of the stack.
        source: ``state`` or ``stack file``.
        stack: name of the stack.
        now: time of the assessment.
        key_times: creation and last change of each Secret by its title, RFC 3339.
        made_by_charts: number of the objects of charts, which are not assessed.
    """
    results = assess(recording, today=now.date())
    objects = with_templates(manifests(recording))
    facts = facts_of(recording.resources)
    used = {each.model_dump_json() for result in results for _, each in result.accepted}
    stack_facts = facts.model_dump(mode="json", exclude={"exceptions"})
    return {
        "stack": {"name": stack, "source": source, "assessed_at": now.isoformat(timespec="seconds"), **stack_facts},
        "policies": [_policy(result) for result in results],
        "exceptions": [
            {**each.model_dump(mode="json"), "is_used": each.model_dump_json() in used} for each in facts.exceptions
        ],
        "exemptions": [
            {"policy": BY_NAME[each.policy].id, "resource": f"{each.kind} {each.component}", "reason": each.reason}
            for each in EXEMPTIONS
            if any(
                (each.kind, each.component) == (found.kind, found.labels.get("app.kubernetes.io/component"))
                for found in objects
            )
        ],
        "images": _images(objects),
        "versions": list(_versions(objects)),
        "flows": flows_of(objects),
        "settings": list(_settings(objects)),
        "keys": [
            {"secret": title, "created": created or "unknown", "changed": changed or "unknown"}
            for title, (created, changed) in sorted(key_times.items())
        ],
        "live_checks": [{"check": check, "status": "not run", "command": command} for check, command in _LIVE_CHECKS],
        "objects_of_charts": made_by_charts,
        "resources": _resources(recording),
    }


def _policy(result: Result) -> dict[str, Any]:
    policy = result.policy
    return {
        "id": policy.id,
        "name": policy.name,
        "title": policy.title,
        "severity": policy.severity,
        "status": result.status,
        "remedy": policy.remedy,
        "references": list(policy.references),
        "problems": [_problem(each) for each in dict.fromkeys(result.violations)],
        "accepted": [
            {**_problem(each), "exception": exception.model_dump(mode="json")} for each, exception in result.accepted
        ],
        "proofs": [
            {"resource": each.resource, "property": each.path, "value": shown(each.value)}
            for each in result.proofs[:_SHOWN_PROOFS]
        ],
        "proof_count": len(result.proofs),
    }


def _problem(violation: Violation) -> dict[str, str]:
    return {"resource": violation.resource, "problem": violation.problem}


def _images(objects: Sequence[Manifest]) -> list[dict[str, str]]:
    users: dict[str, list[str]] = {}
    for manifest in objects:
        for image in images(manifest):
            users.setdefault(image, []).append(manifest.title)
    return [{"image": image, "used_by": ", ".join(dict.fromkeys(titles))} for image, titles in sorted(users.items())]


def _versions(objects: Sequence[Manifest]) -> Iterator[dict[str, str]]:
    for manifest in objects:
        spec = manifest.body.get("spec") or {}
        if manifest.body.get("apiVersion") == "helm.sh":
            yield {
                "resource": manifest.title,
                "version": f"chart {spec.get('chart')} {spec.get('version', '')}".strip(),
            }
        elif manifest.kind == "RayJob":
            model = (manifest.metadata.get("annotations") or {}).get("cloister.dev/model", "")
            yield {
                "resource": f"jobs of the model {model}",
                "version": f"Ray {(spec.get('rayClusterSpec') or {}).get('rayVersion', '')}",
            }
        elif manifest.kind == "ImageCatalog":
            yield from (
                {"resource": manifest.title, "version": f"Postgres {each.get('major')}"} for each in spec["images"]
            )


def _settings(objects: Iterable[Manifest]) -> Iterator[dict[str, str]]:
    from infra.policy.pod_checks import environments

    for manifest in objects:
        for title, variables in environments(manifest):
            for name, meaning in _SETTINGS.items():
                if variables.get(name):
                    yield {"resource": f"{manifest.title}, {title}", "setting": meaning, "value": variables[name]}
        if manifest.kind == "ObjectStore" and (limit := manifest.body["spec"].get("retentionPolicy")):
            yield {"resource": manifest.title, "setting": "backups are deleted after", "value": str(limit)}


def _resources(recording: Recording) -> dict[str, dict[str, Any]]:
    """Return all fields of all resources by title; secret values are None, long ones are digests."""
    found: dict[str, dict[str, Any]] = {}
    for field in fields_of(recording):
        found.setdefault(field.resource, {})[field.path] = shown(field.value)
    return dict(sorted(found.items()))


def shown(value: Any) -> Any:
    """Return a value for a report; the SHA-256 of a long text."""
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        return f"{len(value)} characters, SHA-256 {hashlib.sha256(value.encode()).hexdigest()}"
    return value


def changes(old: Content, new: Content) -> list[dict[str, str]]:
    """Return what differs between two assessments: policies, exceptions, and fields of resources.

    Args:
        old: content of the earlier report.
        new: content of this one.
    """
    found: list[dict[str, str]] = []

    def compare(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for name in sorted({*before, *after}):
            if before.get(name, _MISSING) != after.get(name, _MISSING):
                was, now = (_text(each.get(name, _MISSING)) for each in (before, after))
                found.append({"what": what, "where": name, "before": was, "after": now})

    compare("policy", *({each["id"]: each["status"] for each in content["policies"]} for content in (old, new)))
    compare(
        "exception",
        *(
            {
                f"{each['policy']} {each['resource']}": f"{each['reason']}, until {each['expires']}"
                for each in content["exceptions"]
            }
            for content in (old, new)
        ),
    )
    for title in sorted({*old["resources"], *new["resources"]}):
        before, after = old["resources"].get(title), new["resources"].get(title)
        if before is None or after is None:
            compare("resource", {title: "existed"} if before else {}, {title: "exists"} if after else {})
        else:
            compare(title, before, after)
    return found


_MISSING: Final = "(none)"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
