"""Rendered manifests without a cluster, and the documentation pages generated from the program."""
