"""Modules of the benchmark, which no other test imports."""

import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    ["__main__", "assembly", "calibration", "control_plane.run", "control_plane.jobs", "runners", "validation"],
)
def test_module_of_the_benchmark_can_be_imported(module: str) -> None:
    assert importlib.import_module(f"tests.bench.{module}")
