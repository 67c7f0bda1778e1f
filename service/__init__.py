"""The batch service of cloister: the OpenAI-compatible API, the reconciler and the local stack."""
