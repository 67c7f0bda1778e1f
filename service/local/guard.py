"""Ends everything when the supervisor dies, even by ``kill -9``.

Run as ``python -m service.local.guard DATA_DIR`` with a pipe from the supervisor as its standard
input. Nothing is ever written to the pipe: its end is the news. The guard keeps the lock of the data
directory open, so that the next ``cloister local`` waits until it has finished.
"""

import os
import signal
import sys
from pathlib import Path

from service.local.layout import layout_of
from service.local.processes import end_everything


def main() -> int:
    """Waits for the end of the supervisor, then clears up."""
    # The terminal's Ctrl-C and a shutdown's TERM reach the guard too; its work begins after them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    layout = layout_of(Path(sys.argv[1]))
    while os.read(sys.stdin.fileno(), 1):
        pass
    end_everything(layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
