"""The report for people, in Markdown and in HTML, from the same tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from infra.evidence.content import Content

_STYLE: Final = """
body { font: 11pt/1.4 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #111; }
table { border-collapse: collapse; width: 100%; margin: 0.5em 0 1.5em; font-size: 9.5pt; }
th, td { border: 1px solid #bbb; padding: 0.25em 0.5em; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
th { background: #eee; }
h2 { border-bottom: 2px solid #444; break-after: avoid; }
tr { break-inside: avoid; }
.not-met { background: #fbb; } .excepted { background: #fe9; } .met { background: #cfc; }
svg { width: 100%; height: auto; }
@media print { body { margin: 0; max-width: none; } @page { margin: 15mm; } }
"""
_STATUSES: Final = ("met", "not met", "excepted", "not applicable")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A section with one table."""

    title: str
    text: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


def markdown(content: Content, changed: Sequence[dict[str, str]] | None, *, signed: bool) -> str:
    """Return the report in Markdown.

    Args:
        content: the content.
        changed: what changed since an earlier report; None without one.
        signed: whether the manifest is signed.
    """
    lines = [f"# {_title(content)}", "", *_summary(content, signed=signed), ""]
    for table in _tables(content, changed):
        lines += [f"## {table.title}", "", table.text, ""]
        if table.rows:
            lines += [_row(table.head), _row(["---"] * len(table.head)), *map(_row, table.rows), ""]
        else:
            lines += ["None.", ""]
    return "\n".join(lines)


def html(content: Content, changed: Sequence[dict[str, str]] | None, picture: str, *, signed: bool) -> str:
    """Return the report as one HTML page without scripts and without references to other files.

    Args:
        content: the content.
        changed: what changed since an earlier report; None without one.
        picture: the drawing of the network, in SVG.
        signed: whether the manifest is signed.
    """
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(_title(content))}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(_title(content))}</h1>",
        *(f"<p>{escape(line)}</p>" for line in _summary(content, signed=signed)),
    ]
    for table in _tables(content, changed):
        parts += [f"<h2>{escape(table.title)}</h2>", f"<p>{escape(table.text)}</p>"]
        if table.title == "Network":
            parts.append(picture)
        if not table.rows:
            parts.append("<p>None.</p>")
            continue
        head = "".join(f"<th>{escape(each)}</th>" for each in table.head)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>")
        for row in table.rows:
            cells = "".join(
                f'<td class="{cell.replace(" ", "-")}">{cell}</td>'
                if cell in _STATUSES
                else f"<td>{escape(str(cell))}</td>"
                for cell in row
            )
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</tbody></table>")
    return "\n".join([*parts, "</body></html>", ""])


def _title(content: Content) -> str:
    return f"Evidence of the stack {content['stack']['name']}"


def _summary(content: Content, *, signed: bool) -> Iterator[str]:
    stack, policies = content["stack"], content["policies"]
    counts = ", ".join(f"{sum(each['status'] == status for each in policies)} {status}" for status in _STATUSES)
    yield f"Assessed at {stack['assessed_at']} from the {stack['source']}. Policies: {counts}."
    if stack["source"] == "stack file":
        yield "A stack file shows what would be deployed, not what is deployed: assess an exported state for that."
    yield (
        "The manifest is signed: `cloister-evidence verify` checks it."
        if signed
        else "The manifest is NOT signed: whoever can write to this folder can change all of it."
    )


def _tables(content: Content, changed: Sequence[dict[str, str]] | None) -> Iterator[_Table]:
    policies = content["policies"]
    if changed is not None:
        rows = [(each["what"], each["where"], each["before"], each["after"]) for each in changed]
        text = "Differences to the earlier report."
        yield _Table(title="Changes", text=text, head=("what", "where", "before", "after"), rows=rows)
    facts = [(name, str(value)) for name, value in content["stack"].items()]
    yield _Table(title="Stack", text="What was assessed.", head=("fact", "value"), rows=facts)
    yield _Table(
        title="Policies",
        text="A mandatory policy that is not met stops a deployment. docs/policies.md explains each policy.",
        head=("policy", "severity", "status", "statement", "references"),
        rows=[
            (each["id"], each["severity"], each["status"], each["title"], ", ".join(each["references"]))
            for each in policies
        ],
    )
    yield _Table(
        title="Problems",
        text="Resources that break a policy, and what to do.",
        head=("policy", "resource", "problem", "remedy"),
        rows=[
            (each["id"], problem["resource"], problem["problem"], each["remedy"])
            for each in policies
            for problem in each["problems"]
        ],
    )
    yield _Table(
        title="Exceptions",
        text="Problems that are accepted: by exceptions with a last day, and by other settings of the stack file.",
        head=("policy", "resource", "reason", "owner", "expires", "covers a problem"),
        rows=[
            (
                each["policy"],
                each["resource"],
                each["reason"],
                each["owner"],
                each["expires"] or "never",
                "yes" if each["is_used"] else "no",
            )
            for each in content["exceptions"]
        ],
    )
    yield _Table(
        title="Exemptions",
        text="Problems that every stack may have, in components of this stack.",
        head=("policy", "resource", "reason"),
        rows=[tuple(each.values()) for each in content["exemptions"]],
    )
    yield _Table(
        title="Proofs",
        text="Resources and properties that show each policy, at most 20 each. Empty values are secret.",
        head=("policy", "resource", "property", "value"),
        rows=[
            (each["id"], proof["resource"], proof["property"], "" if proof["value"] is None else proof["value"])
            for each in policies
            for proof in each["proofs"]
        ],
    )
    yield from _inventory(content)


def _inventory(content: Content) -> Iterator[_Table]:
    """Yield the tables of what is deployed."""
    number = f"{len(content['resources'])} objects are assessed"
    charts = f", and {content['objects_of_charts']} objects of charts by the values of the chart only."
    yield _Table(title="Images", text=number + charts, head=("image", "used by"), rows=_values(content["images"]))
    yield _Table(
        title="Versions",
        text="As the resources name them.",
        head=("resource", "version"),
        rows=_values(content["versions"]),
    )
    yield _Table(
        title="Network",
        text="Connections that network policies allow. All others are denied. Every pod can query DNS.",
        head=("from", "to", "ports", "policy"),
        rows=_values(content["flows"]),
    )
    yield _Table(
        title="Retention",
        text="Settings that limit how long content and keys are kept.",
        head=("resource", "setting", "value"),
        rows=_values(content["settings"]),
    )
    yield _Table(
        title="Keys",
        text="When Pulumi created and last changed each Secret. A stack file does not show it.",
        head=("secret", "created", "changed"),
        rows=_values(content["keys"]),
    )
    yield _Table(
        title="Live checks",
        text="This report examines files. These checks need the running stack.",
        head=("check", "status", "command"),
        rows=_values(content["live_checks"]),
    )


def _values(items: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(each.values()) for each in items]


def _row(cells: Sequence[Any]) -> str:
    shown = (
        str(cell).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in cells
    )
    return f"| {' | '.join(shown)} |"
