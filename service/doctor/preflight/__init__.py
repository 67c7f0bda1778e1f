"""Checks that need pods: ``cloister doctor --stack-file`` runs them in temporary namespaces, before and after `up`."""
