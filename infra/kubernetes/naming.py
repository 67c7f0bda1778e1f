"""Names of a stack, unique among all stacks that share a cluster, a Postgres server or a bucket.

The name of a customer may contain hyphens, the name of an environment may not, and no environment is called ``jobs``.
So every name has one interpretation, and two stacks never share a name.
"""

import re
from dataclasses import dataclass
from typing import Final

from ray_job.contract.cluster import CUSTOMER_LABEL, jobs_namespace

_CUSTOMER: Final = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
_CUSTOMER_LENGTH: Final = 20
_ENVIRONMENT: Final = r"[a-z][a-z0-9]{0,11}"
_RESERVED: Final = "jobs"
_PLATFORM: Final = "platform"


def check_customer(name: str) -> str:
    """Return a valid customer name.

    Raises:
        ValueError: the name is invalid; the message describes valid names.
    """
    if name == _PLATFORM:
        raise ValueError("cannot be 'platform', which is the owner of what all customers share; use another name")
    if len(name) > _CUSTOMER_LENGTH or not re.fullmatch(_CUSTOMER, name):
        raise ValueError(
            f"must be at most {_CUSTOMER_LENGTH} lower case letters, digits and single hyphens, and start with a letter"
        )
    return name


def check_environment(name: str) -> str:
    """Return a valid environment name.

    Raises:
        ValueError: the name is invalid; the message describes valid names.
    """
    if name == _RESERVED:
        raise ValueError("cannot be 'jobs', which is the end of another namespace's name; use another word, e.g. dev")
    if not re.fullmatch(_ENVIRONMENT, name):
        raise ValueError("must be at most 12 lower case letters and digits without a hyphen, and start with a letter")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNames:
    """Names of the stack of one customer and environment.

    Attributes:
        customer: up to 20 lower case letters, digits and single hyphens, starting with a letter.
        environment: up to 12 lower case letters and digits, starting with a letter; not ``jobs``.

    Raises:
        ValueError: customer or environment is not a valid name.
    """

    customer: str
    environment: str

    def __post_init__(self) -> None:
        if self.customer != _PLATFORM:
            check_customer(self.customer)
        check_environment(self.environment)

    @property
    def instance(self) -> str:
        """``acme-dev``: the stack in labels."""
        return f"{self.customer}-{self.environment}"

    @property
    def service_namespace(self) -> str:
        """``cloister-acme-dev``: API, reconciler, coordinator, database and object store."""
        return f"cloister-{self.instance}"

    @property
    def jobs_namespace(self) -> str:
        """``cloister-acme-dev-jobs``: the Ray clusters of jobs."""
        return jobs_namespace(self.service_namespace)

    @property
    def database(self) -> str:
        """``cloister_acme_dev``: the database, and the role that owns it; a server's databases share their roles."""
        return self.service_namespace.replace("-", "_")

    @property
    def database_service_role(self) -> str:
        """``cloister_acme_dev_service``: the role that the service logs in with, which owns nothing."""
        return f"{self.database}_service"

    @property
    def bucket(self) -> str:
        """``cloister-acme-dev``: the bucket of a bundled object store."""
        return self.service_namespace

    @property
    def object_prefix(self) -> str:
        """``acme/dev``: prefix of the stack's objects in a bucket that others may use too."""
        return f"{self.customer}/{self.environment}"

    def cluster_scoped(self, name: str) -> str:
        """``cloister-acme-dev-<name>``: a resource without a namespace."""
        return f"{self.service_namespace}-{name}"

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels of every resource of a component.

        Args:
            component: name of the component, e.g. ``api``.
        """
        return {
            **self.selector(component),
            "app.kubernetes.io/part-of": "cloister",
            "app.kubernetes.io/managed-by": "pulumi",
            CUSTOMER_LABEL: self.customer,
            "cloister.dev/environment": self.environment,
        }

    def selector(self, component: str) -> dict[str, str]:
        """Return the labels that select a component's pods. They never change, because a selector is immutable."""
        return {
            "app.kubernetes.io/name": "cloister",
            "app.kubernetes.io/instance": self.instance,
            "app.kubernetes.io/component": component,
        }


PLATFORM: Final = StackNames(customer=_PLATFORM, environment="cluster")
"""Names of the objects that all customers of a cluster share, in a stack of the layer ``platform``."""
