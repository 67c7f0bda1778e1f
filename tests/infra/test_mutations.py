"""Each policy turns red for a bad resource of an example stack, and no weaker setting of a stack file survives."""

import pytest

from infra.policy import CATALOGUE
from infra.policy.catalogue import BY_NAME
from infra.rendering.recording import Recording
from tests.infra.mutations import MUTATIONS, Mutation, mutated, problems, red, results
from tests.infra.previewed_stacks import STACKS, preview


def example_of(mutation: Mutation) -> tuple[Recording, Recording]:
    """Return the first example stack that has the resource and meets the policy, and its mutation."""
    for name in ("air-gap", "v100-and-a10g", "bare-hosts"):
        good = preview(name)
        if mutation.policy not in red(good) and (changed := mutated(good, mutation)) and changed != good:
            return good, changed
    raise AssertionError(mutation.resource)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{each.policy}-{each.resource}" for each in MUTATIONS])
def test_bad_resource_turns_exactly_its_policy_red(mutation: Mutation) -> None:
    before, after = (problems(each) for each in example_of(mutation))

    assert {problem.split()[0] for problem in after - before} == {BY_NAME[mutation.policy].id}


def test_every_policy_has_a_mutation() -> None:
    assert {mutation.policy for mutation in MUTATIONS} == {policy.name for policy in CATALOGUE}


@pytest.mark.slow
def test_no_mutation_of_an_example_stack_survives() -> None:
    rows = [(name, *row) for name in STACKS for row in results(name)]

    assert len(rows) >= 150
    assert [row for row in rows if not row[2]] == []
