"""Repositories of ECR for the images of a stack: nodes pull from nowhere else.

Images are pushed, and named by digest. A pull-through cache would need a route to the internet at the first pull:
https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html.
"""

from typing import Final

import pulumi
from pulumi_aws import ecr

from infra.aws.keys import create_key
from infra.aws.policies import Place, key_use_through

REPOSITORIES: Final = ("service", "ray-cpu", "ray-v100", "ray-cuda13", "kuberay-operator")


class AwsRegistry(pulumi.ComponentResource):
    """The repositories, below the name of the cluster.

    Attributes:
        urls: URL of each repository by its name.

    Args:
        name: logical name of the component.
        place: account, region and name of the cluster.
        keep_data: whether Pulumi refuses to delete the repositories.
        opts: options of the component.
    """

    urls: dict[str, pulumi.Output[str]]

    def __init__(self, name: str, place: Place, *, keep_data: bool, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:aws:Registry", name, None, opts)
        child = pulumi.ResourceOptions(parent=self, protect=keep_data)
        key = create_key(f"{place.cluster}-images", "images", place, (key_use_through(place, ["ecr"]),), child)
        self.urls = {
            repository: ecr.Repository(
                repository,
                name=f"{place.cluster}/{repository}",
                image_tag_mutability="IMMUTABLE",
                image_scanning_configuration={"scan_on_push": True},
                encryption_configurations=[{"encryption_type": "KMS", "kms_key": key.arn}],
                opts=child,
            ).repository_url
            for repository in REPOSITORIES
        }
        self.register_outputs({})
