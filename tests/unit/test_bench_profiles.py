from dataclasses import replace

import pytest

from ray_job.contract.accelerators import ACCELERATORS
from tests.bench.calibration import Sample, fit
from tests.bench.simulated_gpu.profiles import PROFILES, Profile, Step

H100 = PROFILES["h100-8b"]


def decode(rows: int, context: int = 500) -> Step:
    return Step(tokens=rows, context_tokens=rows * context, attended_pairs=rows * context)


def prefill(tokens: int) -> Step:
    return Step(tokens=tokens, context_tokens=0, attended_pairs=tokens * tokens // 2)


def test_one_row_is_bound_by_reading_the_weights() -> None:
    weights_s = H100.model.weight_bytes / H100.gpu.bandwidth
    assert H100.step_s(decode(1)) == pytest.approx(weights_s + H100.overhead_s, rel=0.01)


def test_prompts_are_bound_by_compute() -> None:
    assert H100.step_s(prefill(8192)) == pytest.approx(H100.flops(prefill(8192)) / 400e12 + H100.overhead_s)


def test_many_rows_share_the_reading_of_the_weights() -> None:
    assert H100.step_s(decode(64)) < 2 * H100.step_s(decode(1))


def test_longer_contexts_take_longer() -> None:
    assert H100.step_s(decode(256, context=2000)) > 1.5 * H100.step_s(decode(256, context=100))


def test_gpus_add_up_but_exchange_activations() -> None:
    four = PROFILES["h100-70b"]
    one = replace(four, gpus=1)
    assert one.step_s(prefill(8192)) / 4 < four.step_s(prefill(8192)) < one.step_s(prefill(8192))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_has_room_for_a_cache(name: str) -> None:
    profile = PROFILES[name]
    assert profile.gpu.accelerator in ACCELERATORS
    assert profile.kv_cache_tokens > 30_000
    assert profile.gpu.effective_flops <= profile.gpu.peak_flops
    assert profile.gpu.source.startswith("https://")


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if profile.gpus > 1])
def test_half_of_the_gpus_would_be_too_few(name: str) -> None:
    profile = PROFILES[name]
    assert replace(profile, gpus=profile.gpus // 2).kv_cache_tokens < 64_000 < profile.kv_cache_tokens


def test_rows_are_limited_by_the_cache() -> None:
    assert PROFILES["a10g-8b"].max_num_seqs(550) == 64
    assert H100.max_num_seqs(50) == 1024


def samples(profile: Profile, steps: list[Step]) -> list[Sample]:
    return [Sample(step=step, seconds=profile.step_s(step)) for step in steps]


def test_calibration_recovers_the_figures_of_a_profile() -> None:
    found = fit(H100, samples(H100, [decode(rows) for rows in (1, 8, 64, 200)]), samples(H100, [prefill(8192)]))
    assert found.bandwidth == pytest.approx(H100.gpu.bandwidth)
    assert found.overhead_s == pytest.approx(H100.overhead_s)
    assert found.effective_flops == pytest.approx(H100.gpu.effective_flops)
