"""The HTTP API.

``app`` builds the application: ``routes`` (one module per resource), ``dependencies`` (backends and authentication),
``schemas`` (requests and answers), ``extension`` (``x_cloister``), ``errors`` (OpenAI's error envelope), ``middleware``
(log, metrics and limits), ``watching`` (event streams) and ``openapi`` (the served document).
"""
