"""``python -m tests.bench calibrate``: measure the figures of a profile on a real GPU.

It loads the model in vLLM, measures steps of known size and fits three figures:

- the bandwidth and the overhead of a step from decoding with 1 to 32 rows (a line through time over bytes read),
- the effective rate of compute from prompts that fill whole steps.

It prints them beside those of the profile, with the largest deviation of the model of a step from the measured times.
``--simulated`` runs the same on the simulated GPU, which must return the figures of the profile.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ray_job.demo_model import make_demo_model
from tests.bench.simulated_gpu.profiles import PROFILES, Profile, Step
from tests.bench.simulation import Simulation, make_simulated_model
from tests.bench.workloads import WORKLOADS

# Few rows with long contexts, so that reading the KV cache and not computing takes the time, on slow GPUs too.
DECODE_ROWS: Final = (1, 4, 8, 16, 32)
PROMPT_TOKENS: Final = 2048
SHORT_TOKENS: Final = 8
LONG_TOKENS: Final = 72
PREFILL_TOKENS: Final = 2048
PREFILL_ROWS: Final = (4, 12)
BATCHED_TOKENS: Final = 8192
REPEATS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured step: its work and its time."""

    step: Step
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Figures of one GPU that explain the samples."""

    bandwidth: float
    overhead_s: float
    effective_flops: float


def fit(profile: Profile, decoding: Sequence[Sample], prefilling: Sequence[Sample]) -> Fit:
    """Fit the figures by least squares.

    Args:
        profile: the model and the number of GPUs.
        decoding: steps that are bound by the memory's bandwidth.
        prefilling: steps that are bound by compute.
    """
    xs = [profile.read_bytes(sample.step) for sample in decoding]
    ys = [sample.seconds for sample in decoding]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    overhead_s = mean_y - slope * mean_x
    flops = sum(profile.flops(sample.step) for sample in prefilling)
    seconds = sum(sample.seconds - overhead_s for sample in prefilling)
    return Fit(
        bandwidth=1 / slope / profile.gpus, overhead_s=overhead_s, effective_flops=flops / seconds / profile.gpus
    )


def measure(engine: Any, profile: Profile, vocabulary: int) -> tuple[list[Sample], list[Sample]]:
    """Measure steps of decoding and of prefilling.

    Args:
        engine: vLLM's ``LLM`` with a prefix cache.
        profile: the model and its GPUs, which decide how many rows the KV cache holds.
        vocabulary: the number of tokens.
    """
    from vllm import SamplingParams

    def prompts(rows: int, tokens: int, first_seed: int) -> list[dict[str, list[int]]]:
        chances = (random.Random(first_seed + row) for row in range(rows))  # noqa: S311 - prompts, no secrets
        return [{"prompt_token_ids": chance.choices(range(300, vocabulary), k=tokens)} for chance in chances]

    def seconds(work: list[dict[str, list[int]]], new_tokens: int) -> float:
        parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        engine.generate(work, parameters, use_tqdm=False)
        return time.perf_counter() - started

    decoding = []
    for rows in DECODE_ROWS:
        if rows * (PROMPT_TOKENS + LONG_TOKENS) > profile.kv_cache_tokens:
            break
        work = prompts(rows, PROMPT_TOKENS, 0)
        seconds(work, SHORT_TOKENS)  # fills the prefix cache, so that the runs below only decode
        least = [min(seconds(work, new_tokens) for _ in range(REPEATS)) for new_tokens in (SHORT_TOKENS, LONG_TOKENS)]
        context = rows * (PROMPT_TOKENS + (LONG_TOKENS + SHORT_TOKENS) // 2)
        step = Step(tokens=rows, context_tokens=context, attended_pairs=context)
        decoding.append(Sample(step=step, seconds=(least[1] - least[0]) / (LONG_TOKENS - SHORT_TOKENS)))
    # The difference between many and few prompts leaves out what each call costs once. No prompt is repeated.
    few, many = (
        min(seconds(prompts(rows, PREFILL_TOKENS, 1000 * (rows + run)), 1) for run in range(REPEATS))
        for rows in PREFILL_ROWS
    )
    rows = PREFILL_ROWS[1] - PREFILL_ROWS[0]
    steps = rows * PREFILL_TOKENS // BATCHED_TOKENS
    pairs = rows * PREFILL_TOKENS * (PREFILL_TOKENS + 1) // 2
    step = Step(tokens=BATCHED_TOKENS, context_tokens=0, attended_pairs=pairs // steps)
    return decoding, [Sample(step=step, seconds=(many - few) / steps)]


def main(arguments: Sequence[str]) -> None:
    """Measure, fit, and print the figures beside those of the profile."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench calibrate", description=__doc__)
    parser.add_argument("--profile", choices=PROFILES, required=True)
    parser.add_argument("--model", default="", help="the model's directory or id; its size must be the profile's")
    parser.add_argument("--simulated", action="store_true", help="run on the simulated GPU")
    parser.add_argument("--output", type=Path, default=Path("build/calibration.json"))
    given = parser.parse_args(arguments)
    profile = PROFILES[given.profile]
    options: dict[str, Any] = {"model": given.model, "tensor_parallel_size": profile.gpus, "dtype": "float16"}
    if given.simulated:
        options = simulated_options(given.profile)
    options |= {"max_model_len": 4096, "enable_prefix_caching": True, "max_num_batched_tokens": BATCHED_TOKENS}
    from vllm import LLM

    engine = LLM(**options)
    decoding, prefilling = measure(engine, profile, engine.llm_engine.vllm_config.model_config.get_vocab_size())
    found = fit(profile, decoding, prefilling)
    deviation = max(abs(profile.step_s(sample.step) / sample.seconds - 1) for sample in [*decoding, *prefilling])
    rows = {
        "bandwidth (GB/s)": (found.bandwidth / 1e9, profile.gpu.bandwidth / 1e9),
        "effective TFLOPS": (found.effective_flops / 1e12, profile.gpu.effective_flops / 1e12),
        "overhead of a step (ms)": (1000 * found.overhead_s, 1000 * profile.overhead_s),
    }
    print(f"| figure | measured | profile {given.profile} |\n|---|---:|---:|")
    for name, (measured, expected) in rows.items():
        print(f"| {name} | {measured:.4g} | {expected:.4g} |")
    print(f"largest deviation of the profile from a measured step: {100 * deviation:.0f} %")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({name: measured for name, (measured, _) in rows.items()}, indent=1) + "\n")


def simulated_options(profile: str) -> dict[str, Any]:
    """Return the engine arguments of the simulated GPU."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = Path("build/bench/simulated-model").absolute()
    make_demo_model(Path("build/demo_model"))
    make_simulated_model(model, Path("build/demo_model"))
    arguments = Simulation(profile=profile).engine_args(WORKLOADS["fixed"], Path("build/bench/calibration.devices"))
    return {**arguments, "model": str(model), "max_num_seqs": max(DECODE_ROWS)}
