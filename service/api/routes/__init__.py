"""The routes of the HTTP API, one module per resource. Each route documents itself for ``/openapi.json``."""
