"""A private stack on AWS: VPC, EKS cluster, registry, database, bucket, keys and the identities of pods (ADR 17)."""
