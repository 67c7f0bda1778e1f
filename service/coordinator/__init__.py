"""The coordinator: an internal HTTP API, from which jobs lease segments and to which they commit parts.

All state is in Postgres, so any number of coordinators can run. The messages are in ``ray_job.contract.leases``.
"""
