"""The batch service of a stack: API, reconciler and migrations."""
