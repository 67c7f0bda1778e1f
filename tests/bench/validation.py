"""Compares validation with a bare ``orjson.loads`` loop over the same file, each in a separate process, alternating.

``python -m tests.bench validation`` takes about a minute and needs no engine and no model. It measures CPU seconds
instead of elapsed time, so that other processes matter less. Memory is the growth of the process' peak during reading.
"""

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LINES: Final = 50_000
# Bytes of one line. The larger size makes the largest file that may be uploaded.
LINE_BYTES: Final = {"4 kB": 4_000, "200 B": 200}
_CHUNK_BYTES: Final = 1 << 20
_CHAT: Final = "/v1/chat/completions"
_WORDS: Final = (
    "the",
    "loop",
    "ends",
    "when",
    "its",
    "condition",
    "is",
    "false;",
    "see",
    "[1]",
    "{x}",
    "„é“",
    "a\nb",
    '"q"',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The measurements of one process that read one file."""

    file: str
    reader: str
    run: int
    cpu_s: float
    mb_per_s: float
    grown_mb: float


def write_lines(path: Path, line_bytes: int) -> None:
    """Write chat requests, some with text that JSON must escape."""
    chance = random.Random(0)  # noqa: S311 - the same text on every run
    with path.open("w") as file:
        for number in range(LINES):
            text = " ".join(chance.choices(_WORDS, k=line_bytes // 4))
            request = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": _CHAT,
                "body": {"model": "demo", "messages": [{"role": "user", "content": ""}], "max_tokens": 64},
            }
            room = max(8, line_bytes - len(json.dumps(request)))
            request["body"]["messages"][0]["content"] = text.encode()[:room].decode(errors="ignore")
            file.write(json.dumps(request, ensure_ascii=False) + "\n")


def read_bare(path: Path) -> None:
    """Parse every line and do nothing else."""
    import orjson

    with path.open("rb") as file:
        for line in file:
            orjson.loads(line)


def read_and_validate(path: Path) -> None:
    """Validate an input file as the reconciler does."""
    from ray_job.contract.job_spec import ModelSpec
    from service.input_file import read_input_file
    from service.model_catalogue import CatalogueModel

    models = {"demo": CatalogueModel(spec=ModelSpec(id="demo", source="demo"))}
    facts = read_input_file(_chunks(path), endpoint=_CHAT, models=models)
    if facts.error_count or facts.total != LINES:
        raise RuntimeError(f"the file should be valid: {facts}")


READERS: Final[Mapping[str, Callable[[Path], None]]] = {"bare orjson": read_bare, "validation": read_and_validate}


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _read_here(reader: str, path: Path) -> None:
    """Read the file in this process, and print the CPU seconds and the growth of the peak in MB."""
    import orjson  # noqa: F401 - imports are not measured

    import service.input_file
    import service.model_catalogue  # noqa: F401

    before = _peak_mb()
    start = time.process_time()
    READERS[reader](path)
    seconds = time.process_time() - start
    print(json.dumps([seconds, _peak_mb() - before]))


def _peak_mb() -> float:
    """Return the peak memory of this process. getrusage would start at the size of the parent process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(file: str, reader: str, path: Path, run: int) -> Reading:
    """Read one file in a new process."""
    command = [sys.executable, "-m", "tests.bench.validation", reader, str(path)]
    cpu_s, grown_mb = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    megabytes = path.stat().st_size / 2**20
    return Reading(file=file, reader=reader, run=run, cpu_s=cpu_s, mb_per_s=megabytes / cpu_s, grown_mb=grown_mb)


def table(readings: Sequence[Reading]) -> str:
    """Return medians as text: a line for each file and reader, with its speed relative to the bare loop."""
    rows = [f"{'lines of':<9} {'reader':<12} {'CPU s':>7} {'MB/s':>7} {'of bare':>8} {'peak grew by':>13}"]
    for file in dict.fromkeys(reading.file for reading in readings):
        seconds = {
            reader: statistics.median(r.cpu_s for r in readings if (r.file, r.reader) == (file, reader))
            for reader in READERS
        }
        for reader in READERS:
            runs = [r for r in readings if (r.file, r.reader) == (file, reader)]
            speed, grown = statistics.median(r.mb_per_s for r in runs), max(r.grown_mb for r in runs)
            part = seconds["bare orjson"] / seconds[reader]
            rows.append(f"{file:<9} {reader:<12} {seconds[reader]:>7.3f} {speed:>7.0f} {part:>8.2f} {grown:>10.0f} MB")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> None:
    """Measure, print one table and write the single readings as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench validation", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each reader on each file, alternating")
    parser.add_argument("--output", type=Path, default=Path("build/bench-validation.json"))
    given = parser.parse_args(arguments)
    directory = given.output.parent / "bench-validation"
    directory.mkdir(parents=True, exist_ok=True)
    readings: list[Reading] = []
    for file, line_bytes in LINE_BYTES.items():
        path = directory / f"{line_bytes}.jsonl"
        write_lines(path, line_bytes)
        print(f"{LINES:,} lines of {file}, {path.stat().st_size / 2**20:.0f} MB", flush=True)
        for run in range(given.runs):
            readings += [measure(file, reader, path, run) for reader in READERS]
        path.unlink()
    given.output.write_text(json.dumps([dataclasses.asdict(reading) for reading in readings], indent=1) + "\n")
    print(table(readings))


if __name__ == "__main__":
    _read_here(sys.argv[1], Path(sys.argv[2]))
