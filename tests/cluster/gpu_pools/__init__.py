"""Simulated GPU nodes with the real autoscalers that request them: Ray's of a job, Karpenter of a cluster."""
