"""Policies of every resource of every stack: one catalogue, and checks as pure functions over manifests.

A check takes manifests and yields problems in them, each with the name of its policy. It is independent of the program
that created the manifests, so it catches the program's mistakes. The program, ``make render``, `pulumi preview
--policy-pack infra/policy`, tests and the evidence use the same checks.
"""

from infra.policy.assessment import Result, Violation, assess, refusals, violations
from infra.policy.catalogue import CATALOGUE, Policy

__all__ = ["CATALOGUE", "Policy", "Result", "Violation", "assess", "refusals", "violations"]
