"""``python -m tests.simulation``: run histories, and print the seeds that fail. See docs/simulation.md."""

import argparse
import sys
import time
from collections import Counter

from tests.simulation.database import postgres_server
from tests.simulation.histories import run_chunks, simulator, worker_processes


def main() -> int:
    """Run the histories that the arguments name, and return the exit status: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0-999", help="run these seeds, from the first to the last (default: 0-999)")
    parser.add_argument("--seed", type=int, help="run one seed, and print what happens")
    parser.add_argument("--processes", type=int, default=2, help="processes that run histories (default: 2)")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        with postgres_server() as url, simulator(url, "simulation") as opened:
            failure, states, trace = opened.run(arguments.seed)
        print(*trace, sep="\n")
        print(failure.problem if failure else f"batches: {dict(states)}")
        return int(failure is not None)
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    began, failed, totals = time.monotonic(), 0, Counter[str]()
    with worker_processes(arguments.processes) as executor:
        for failures, states in run_chunks(executor, seeds):
            totals += states
            failed += len(failures)
            for failure in failures:
                print(f"seed {failure.seed}: {failure.problem}\n    replay: {failure.command}", flush=True)
    elapsed_s = time.monotonic() - began
    print(f"{len(seeds)} histories, {failed} failed, {elapsed_s:.0f} s; batches: {dict(totals)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
