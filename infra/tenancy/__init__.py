"""The boundaries of a stack: namespaces, quotas, roles, network policies, credentials."""
