"""The API key of an endpoint of the http engine."""

from pathlib import Path

import pytest

from ray_job.engines.http import API_KEY_FILE_VARIABLE, API_KEY_VARIABLE, api_key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "api_key"
    path.write_text("from-a-file\n")
    return path


def test_key_is_read_from_a_variable_or_a_file(file: Path) -> None:
    assert api_key({API_KEY_VARIABLE: "in-clear"}) == "in-clear"
    assert api_key({API_KEY_FILE_VARIABLE: str(file)}) == "from-a-file"
    assert api_key({API_KEY_VARIABLE: "in-clear", API_KEY_FILE_VARIABLE: str(file)}) == "in-clear"


def test_key_is_optional() -> None:
    assert api_key({}) == ""
