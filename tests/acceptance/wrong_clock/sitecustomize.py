"""Wall clock that is wrong by the seconds in the file ``WRONG_CLOCK``; the monotonic clock stays.

Python imports this module at its start if the directory is on ``PYTHONPATH``.
"""

import ctypes
import datetime as dt
import gc
import os
import time
from pathlib import Path

_shift_s = int(Path(os.environ["WRONG_CLOCK"]).read_text())
_time, _time_ns = time.time, time.time_ns


def _now(cls: type[dt.datetime], tz: dt.tzinfo | None = None) -> dt.datetime:
    return cls.fromtimestamp(time.time(), tz)


def _utcnow(cls: type[dt.datetime]) -> dt.datetime:
    return cls.now(dt.UTC).replace(tzinfo=None)


time.time = lambda: _time() + _shift_s
time.time_ns = lambda: _time_ns() + _shift_s * 1_000_000_000
# A subclass instead would be no datetime for code in C, such as that of psycopg.
(_attributes,) = gc.get_referents(dt.datetime.__dict__)
_attributes |= {"now": classmethod(_now), "utcnow": classmethod(_utcnow)}
ctypes.pythonapi.PyType_Modified(ctypes.py_object(dt.datetime))
