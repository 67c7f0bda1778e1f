"""Alerts, dashboards, and the objects by which Prometheus Operator finds the metrics of a stack."""
