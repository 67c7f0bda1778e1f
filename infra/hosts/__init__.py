"""A private Kubernetes cluster on bare hosts, which Pulumi's command provider reaches by SSH."""
