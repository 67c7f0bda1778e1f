"""`cloister doctor` in this process, and the settings of a stack on this machine."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from service.cli.app import main
from tests.integration.doctor.doctor_run import Doctor, DoctorRun

ROLE = "doctor_job"


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
def job_role(database_url: str) -> Iterator[str]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {ROLE} LOGIN")
        connection.execute(f"GRANT EXECUTE ON FUNCTION report_progress TO {ROLE}")
        yield ROLE
        connection.execute(f"DROP OWNED BY {ROLE}")
        connection.execute(f"DROP ROLE {ROLE}")


@pytest.fixture
def settings(
    doctor: Doctor, job_role: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Set the settings of a stack on this machine. Call the fixture to change some."""
    del doctor
    (tmp_path / "models.yaml").write_text("models: [{id: demo, source: /models/demo}]")

    def change(**changed: str) -> None:
        for name, value in changed.items():
            monkeypatch.setenv(f"CLOISTER_{name}", value)

    job_database_url = database_url.replace("postgresql://postgres:@", f"postgresql://{job_role}@")
    change(
        DATABASE_URL=database_url,
        JOB_DATABASE_URL=job_database_url,
        OBJECT_STORE=(tmp_path / "objects").as_uri(),
        MODELS=str(tmp_path / "models.yaml"),
    )
    return change
