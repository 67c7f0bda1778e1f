"""Invariants of every resource of every stack, as pure functions over manifests.

A check takes manifests and yields problems in them, each with the name of its invariant. It is independent of the
program that created the manifests, so it catches the program's mistakes.
"""

from infra.policy.invariants import INVARIANTS, Violation, violations

__all__ = ["INVARIANTS", "Violation", "violations"]
