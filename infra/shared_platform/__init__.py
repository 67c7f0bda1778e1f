"""The platform that a cluster has once: node labels, NVIDIA's device plugin, KubeRay's operator."""
