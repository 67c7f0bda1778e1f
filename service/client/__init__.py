"""A client of the public API with terminal output: what ``service.cli`` and ``service.doctor`` share."""
