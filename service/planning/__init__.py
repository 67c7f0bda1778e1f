"""Plans of batches: the order in which their lines run, and the segments that jobs lease.

A plan is made while the input file is validated, and written when the batch is accepted: see
``ray_job.contract.plans``.
"""

from service.planning.plan import PlanBuilder, Segment

__all__ = ["PlanBuilder", "Segment"]
