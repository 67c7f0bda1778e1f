"""Checks of ``cloister doctor``, as a library: each check yields findings. The command is ``service.cli.doctor``.

Viewpoints are the cluster as the user of a kubeconfig (``cluster``), the inside of a pod (``pod``), and the API as a
client (``api``).
"""
