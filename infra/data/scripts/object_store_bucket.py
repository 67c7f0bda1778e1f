"""Makes the bucket of the bundled object store where it is missing, and sets what the key of jobs may do in it.

Run with the service's key, at every deployment that changes anything here. Its settings are environment variables:
ENDPOINT_URL, REGION, BUCKET, and POLICY, a bucket policy in JSON.
"""

import os
from collections.abc import Mapping

import boto3
from botocore.config import Config


def main(environment: Mapping[str, str]) -> None:
    """Makes the bucket and sets its policy; both may be so already."""
    bucket = environment["BUCKET"]
    client = boto3.client(
        "s3",
        endpoint_url=environment["ENDPOINT_URL"],
        region_name=environment["REGION"],
        # The server may still be starting: ten attempts are about three minutes.
        config=Config(connect_timeout=5, retries={"mode": "standard", "total_max_attempts": 10}),
    )
    if bucket not in {known["Name"] for known in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=bucket)
    client.put_bucket_policy(Bucket=bucket, Policy=environment["POLICY"])
    client.close()


if __name__ == "__main__":
    main(os.environ)
