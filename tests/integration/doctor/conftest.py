"""`cloister doctor` in this process, and the settings of a stack on this machine."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli.app import main
from tests.conftest import as_service
from tests.integration.doctor.doctor_run import Doctor, DoctorRun


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the command in this process, in an empty directory and without settings."""
    for name in [*os.environ]:
        if name.startswith(("CLOISTER_", "OPENAI_", "KUBERNETES_", "AWS_")):
            monkeypatch.delenv(name)
    shell = tmp_path / "shell"
    shell.mkdir()
    monkeypatch.chdir(shell)

    def run(*arguments: str) -> DoctorRun:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments, "--json"])
        return DoctorRun(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def settings(doctor: Doctor, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the settings of a stack on this machine. Call the fixture to change some."""
    del doctor
    (tmp_path / "models.yaml").write_text("models: [{id: demo, source: /models/demo}]")

    def change(**changed: str) -> None:
        for name, value in changed.items():
            monkeypatch.setenv(f"CLOISTER_{name}", value)

    change(
        DATABASE_URL=as_service(database_url),
        OBJECT_STORE=(tmp_path / "objects").as_uri(),
        MODELS=str(tmp_path / "models.yaml"),
    )
    return change
