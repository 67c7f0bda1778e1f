"""Measurements of a job: the work of its engines, from which the duration of other batches is estimated."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Final

VERSION: Final = 1
MAX_BYTES: Final = 4_096
_LARGEST: Final = 10**15


class MeasurementError(ValueError):
    """An object that does not hold a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The work of one job that answered all lines of a batch.

    Attributes:
        engines: engines that answered lines.
        engine_s: the sum over all engines, from when each was ready until its last part was written.
        busy_s: from the first ready engine until the last part was written.
        rows: lines of the batch; if most of them shared the answer of an equal line, those that engines answered.
        input_tokens: tokens of the prompts of these lines.
        output_tokens: tokens of their answers.
    """

    engines: int
    engine_s: float
    busy_s: float
    rows: int
    input_tokens: int
    output_tokens: int

    def to_json(self) -> bytes:
        """Write the measurement as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Measurement":
        """Read what ``to_json`` has written.

        Raises:
            MeasurementError: not JSON, another version, a wrong field, or a figure that cannot be one.
        """
        try:
            raw = json.loads(text)
            is_known = raw.pop("version") == VERSION
            measurement = cls(**raw)
            figures = [float(value) for value in asdict(measurement).values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise MeasurementError(f"the measurement is unreadable: {type(error).__name__}") from None
        if not is_known or not all(math.isfinite(figure) and 0 <= figure < _LARGEST for figure in figures):
            raise MeasurementError("the measurement has another version, or a figure that cannot be one")
        return measurement
