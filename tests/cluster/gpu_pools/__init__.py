"""Nodes with GPUs that are none, and the real autoscalers that ask for them: Ray's of a job, Karpenter of a cluster."""
