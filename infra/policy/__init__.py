"""What holds for every resource of every stack, as pure functions over manifests.

An invariant takes manifests and tells what is wrong with them. It knows nothing of the program that made them, so it
catches what the program forgets.
"""

from infra.policy.invariants import INVARIANTS, Invariant, Violation, violations

__all__ = ["INVARIANTS", "Invariant", "Violation", "violations"]
