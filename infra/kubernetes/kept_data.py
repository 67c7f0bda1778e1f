"""Options of objects that hold data: they can outlive a stack, and Pulumi never replaces them.

With ``keep_data: true`` the service's namespace, the volume claims in it and a CloudNativePG cluster stay in the
Kubernetes cluster after `pulumi destroy`. The next `pulumi up` must adopt them. Since version 4.29 the Kubernetes
provider refuses to create an object that already exists, unless ``upsertExistingObjects`` is set on the provider. So
these objects have their own provider with that setting. For all other objects this stays an error, because an object
that exists belongs to somebody else.

The provider is the same for both values of ``keep_data``: a stack can change the setting at any time.

Pulumi never deletes a volume claim or a CloudNativePG cluster (``retain_on_delete``), for both values of ``keep_data``:
a recovery names another cluster, and the old one has the only copy of what the recovery left out. With
``keep_data: false`` the deletion of the namespace deletes them.

A change that would replace a claim, such as another storage class, fails and leaves the claim unchanged:

- With ``keep_data: true`` the claim is protected, and Pulumi refuses the replacement in the preview.
- With ``keep_data: false`` Pulumi creates the replacement first (``delete_before_replace=False``). It has the same
  name, so this is an update of the existing claim, and the API server refuses it: the spec of a claim is immutable,
  except for its size.

A larger size is an update in place.
"""

from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes
from pulumi_kubernetes import core, meta

from infra.kubernetes.naming import StackNames


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProtection:
    """Protection of the objects that hold a stack's data.

    Attributes:
        provider: a Kubernetes provider with ``upsert_existing_objects``.
        keep_data: the setting of the stack file: the objects are protected and outlive the stack.
    """

    provider: kubernetes.Provider
    keep_data: bool

    def options(self, parent: pulumi.Resource, *depends_on: pulumi.Resource) -> pulumi.ResourceOptions:
        """Return the options of an object that holds data, which a destroy deletes with ``keep_data: false``.

        Args:
            parent: the component of the object.
            depends_on: resources to create first.
        """
        return pulumi.ResourceOptions(
            parent=parent,
            provider=self.provider,
            depends_on=list(depends_on),
            protect=self.keep_data,
            retain_on_delete=self.keep_data,
        )

    def never_deleted(self, parent: pulumi.Resource, *depends_on: pulumi.Resource) -> pulumi.ResourceOptions:
        """Return the options of an object that holds data, which only the deletion of its namespace deletes.

        Args:
            parent: the component of the object.
            depends_on: resources to create first.
        """
        kept = pulumi.ResourceOptions(retain_on_delete=True, delete_before_replace=False)
        return pulumi.ResourceOptions.merge(self.options(parent, *depends_on), kept)


def data_volume(
    name: str,
    *,
    names: StackNames,
    component: str,
    storage: str,
    storage_class: str,
    protection: DataProtection,
    parent: pulumi.Resource,
) -> core.v1.PersistentVolumeClaim:
    """Create a volume claim for one node at a time in the service's namespace.

    Args:
        name: name of the claim.
        names: names of the stack.
        component: component that writes to the volume, for labels.
        storage: size, a Kubernetes quantity; it can grow later.
        storage_class: empty for the cluster's default; it cannot change later.
        protection: protection of the stack's data.
        parent: the component's resource.
    """
    spec: Any = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": storage}},
        **({"storageClassName": storage_class} if storage_class else {}),
    }
    return core.v1.PersistentVolumeClaim(
        name,
        metadata=meta.v1.ObjectMetaArgs(
            name=name,
            namespace=names.service_namespace,
            labels=names.labels(component),
            # Many storage classes provision a volume for its first pod only, and that pod is created later.
            annotations={"pulumi.com/skipAwait": "true"},
        ),
        spec=spec,
        opts=protection.never_deleted(parent),
    )
