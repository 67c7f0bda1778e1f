"""The load test of the control plane: real processes of the service and a real Postgres, with simulated jobs."""
