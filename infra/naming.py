"""The names of one stack: whatever two stacks on one cluster, one Postgres or one bucket could collide in.

A customer's name may hold hyphens and an environment's may not, and no environment is called ``jobs``: so every name
here can be read in one way only, and two different stacks never share one.
"""

import re
from dataclasses import dataclass
from typing import Final

_CUSTOMER: Final = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
_CUSTOMER_LENGTH: Final = 20
_ENVIRONMENT: Final = r"[a-z][a-z0-9]{0,11}"
_RESERVED: Final = "jobs"


def check_customer(name: str) -> str:
    """Gives the name back if it can be a customer's.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    if len(name) > _CUSTOMER_LENGTH or not re.fullmatch(_CUSTOMER, name):
        raise ValueError(
            f"must be at most {_CUSTOMER_LENGTH} lower case letters, digits and single hyphens, and start with a letter"
        )
    return name


def check_environment(name: str) -> str:
    """Gives the name back if it can be an environment's.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    if name == _RESERVED:
        raise ValueError("cannot be 'jobs', which ends another namespace's name; take another word, e.g. dev")
    if not re.fullmatch(_ENVIRONMENT, name):
        raise ValueError("must be at most 12 lower case letters and digits without a hyphen, and start with a letter")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNames:
    """The names of the stack of one customer and environment.

    Attributes:
        customer: up to 20 lower case letters, digits and single hyphens, starting with a letter.
        environment: up to 12 lower case letters and digits, starting with a letter; not ``jobs``.

    Raises:
        ValueError: one of the two cannot be a part of a name.
    """

    customer: str
    environment: str

    def __post_init__(self) -> None:
        check_customer(self.customer)
        check_environment(self.environment)

    @property
    def instance(self) -> str:
        """``acme-dev``: the stack in labels."""
        return f"{self.customer}-{self.environment}"

    @property
    def service_namespace(self) -> str:
        """``cloister-acme-dev``: API, reconciler, database and object store."""
        return f"cloister-{self.instance}"

    @property
    def jobs_namespace(self) -> str:
        """``cloister-acme-dev-jobs``: the Ray clusters of batches."""
        return f"{self.service_namespace}-jobs"

    @property
    def database(self) -> str:
        """``cloister_acme_dev``: the database, and the role that owns it; Postgres shares roles between databases."""
        return self.service_namespace.replace("-", "_")

    @property
    def job_role(self) -> str:
        """``cloister_acme_dev_job``: the role of jobs, which executes one function and nothing else."""
        return f"{self.database}_job"

    @property
    def bucket(self) -> str:
        """``cloister-acme-dev``: the bucket, where the stack makes its own."""
        return self.service_namespace

    @property
    def object_prefix(self) -> str:
        """``acme/dev``: where the stack's objects are in a bucket that others may use too."""
        return f"{self.customer}/{self.environment}"

    def cluster_scoped(self, name: str) -> str:
        """``cloister-acme-dev-<name>``: a resource that belongs to no namespace."""
        return f"{self.service_namespace}-{name}"

    def labels(self, component: str) -> dict[str, str]:
        """The labels of every resource of the stack.

        Args:
            component: the part of the stack, e.g. ``api``.
        """
        return {
            **self.selector(component),
            "app.kubernetes.io/part-of": "cloister",
            "app.kubernetes.io/managed-by": "pulumi",
            "cloister.dev/customer": self.customer,
            "cloister.dev/environment": self.environment,
        }

    def selector(self, component: str) -> dict[str, str]:
        """The labels that find a component's pods; they never change, because a selector cannot."""
        return {
            "app.kubernetes.io/name": "cloister",
            "app.kubernetes.io/instance": self.instance,
            "app.kubernetes.io/component": component,
        }
