"""Implementations of the ports in ``service.ports``."""
