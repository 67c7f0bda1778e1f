"""Generate docs/policies.md from the catalogue: ``python -m infra.rendering.policies_page [--check]``."""

import sys
from pathlib import Path
from typing import Final

from infra.policy.assessment import EXEMPTIONS
from infra.policy.catalogue import BY_NAME, CATALOGUE
from infra.rendering.generated_page import write_or_check

PAGE: Final = Path(__file__).parents[2] / "docs" / "policies.md"
MODULE: Final = "infra.rendering.policies_page"

_HEAD: Final = f"""\
# Policies

The rules that every stack meets. `python -m {MODULE}` generates this page from `infra/policy/catalogue.py`, the one
list for all of these:

- `pulumi preview` and `pulumi up`: the program runs once without an engine, checks what it would register, and refuses
  a stack that breaks a mandatory policy, with all problems in one message, before any resource changes.
- `make render`: the same check; a stack that breaks a mandatory policy has no manifests.
- `pulumi preview --policy-pack infra/policy`: the same checks as a policy pack of Pulumi, in its own virtual
  environment ([ADR 19](adr/0019-policies.md)).
- [evidence](how-to/evidence.md): each policy with the resources and properties that prove it.

A policy is `mandatory`, or `advisory`: then a stack that breaks it is deployed, and the evidence shows it. References
name requirements that a policy supports; none of them is fulfilled by a policy alone. Versions: CIS Kubernetes
Benchmark 1.10, NIST SP 800-53 revision 5, ISO/IEC 27001:2022 Annex A, GDPR, EU AI Act (Regulation (EU) 2024/1689).

## Exceptions

    cloister:policy:
      exceptions:
        - policy: CLO-IMG-002
          resource: Deployment cloister-acme-prod/*
          reason: the mirror is moved in March
          owner: security@acme.example
          expires: "2030-03-31"

The message of a refused preview shows policy and resource. An exception holds until the end of its last day in UTC;
then a preview refuses the stack. `transport.allow_clear_text`, `durability.allow_single_copy` and `keep_data: false`
are exceptions too, without a last day. The evidence lists all of them. CLO-SEC-002 has no exceptions: a secret in
plain text in the state is disclosed.

"""


def page() -> str:
    """Return the whole page."""
    lines = [_HEAD + "## Catalogue\n", "| policy | severity | statement | remedy | references |"]
    lines.append("|---|---|---|---|---|")
    lines += [
        f"| {each.id} | {each.severity} | {each.title} | {each.remedy} | {', '.join(each.references)} |"
        for each in CATALOGUE
    ]
    lines += [
        "\n## Exemptions\n",
        "Problems that every stack may have:\n",
        "| policy | resource | reason |",
        "|---|---|---|",
        *(f"| {BY_NAME[each.policy].id} | {each.kind}, {each.component} | {each.reason} |" for each in EXEMPTIONS),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), sys.argv[1:], module=MODULE))
