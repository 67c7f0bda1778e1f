"""Choices of the person who runs the checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.doctor.preflight.egress import EXTERNAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Choices of a run.

    Attributes:
        gpu: compute on a GPU of each GPU pool.
        report: directory of the report of egress; None for no report.
        external: destinations outside of the cluster that pods must not reach, ``host:port``.
    """

    gpu: bool = False
    report: Path | None = None
    external: Sequence[str] = EXTERNAL
