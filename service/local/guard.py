"""Ends every process of a data directory when the supervisor dies, even after ``kill -9``.

Run as ``python -m service.local.guard DATA_DIR``, with a pipe from the supervisor as standard input. Nothing is ever
written to the pipe; its end means that the supervisor is gone. The guard keeps the lock of the data directory, so that
the next ``cloister local`` waits until the guard has finished.
"""

import os
import signal
import sys
from pathlib import Path

from service.local.layout import layout_of
from service.local.processes import end_everything


def main() -> int:
    """Wait until the supervisor is gone, then end everything."""
    # Ctrl-C in the terminal and a shutdown's SIGTERM reach the guard too, whose work begins only then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    layout = layout_of(Path(sys.argv[1]))
    while os.read(sys.stdin.fileno(), 1):
        pass
    end_everything(layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
