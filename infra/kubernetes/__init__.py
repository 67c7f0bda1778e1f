"""Pieces of Kubernetes manifests that several packages use: names, images, pod fields, options for kept data."""
