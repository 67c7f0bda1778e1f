"""`make render`: one file for each manifest, reproducible, and without secrets."""

from pathlib import Path

import pytest
import yaml

from infra.rendering.manifests import manifests
from infra.rendering.recording import Recording
from infra.rendering.render import HIDDEN, INDEX, RenderError, main, record_stack, rendered, write
from infra.stack_file.secret_keys import SHOWN_SECRET

ROOT = Path(__file__).parents[2]
DEV = str(ROOT / "Pulumi.dev.yaml")


def read(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_each_resource_is_one_file_without_secrets(example: Recording) -> None:
    files = rendered(example)

    assert len(files) == len(manifests(example))
    secrets = {name: text for name, text in files.items() if "/secret-" in name}
    assert secrets or "cloister-platform/configmap-customers.yaml" in files
    assert all(HIDDEN in text for text in secrets.values())
    assert not any(SHOWN_SECRET in text for text in files.values())


def test_runs_write_the_same_yaml() -> None:
    first, second = rendered(record_stack(Path(DEV))), rendered(record_stack(Path(DEV)))

    assert first == second
    for text in first.values():
        assert {"apiVersion", "kind", "metadata"} <= yaml.safe_load(text).keys()


def test_command_writes_the_files_and_prints_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stack", DEV, "--out", str(tmp_path / "out")]) == 0

    files = read(tmp_path / "out")
    assert "cloister-acme-dev/deployment-api.yaml" in files
    assert f"{len(files) - 1} manifests" in capsys.readouterr().out


def test_second_run_deletes_stale_files(tmp_path: Path) -> None:
    write({"a/one.yaml": "1", "a/two.yaml": "2", "b/three.yaml": "3"}, tmp_path)
    write({"a/two.yaml": "4"}, tmp_path)

    assert read(tmp_path) == {"a/two.yaml": "4", INDEX: "a/two.yaml\n"}
    assert not (tmp_path / "b").exists()


def test_directory_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(RenderError, match="were not rendered"):
        write({"a.yaml": "1"}, tmp_path)

    assert read(tmp_path) == {"notes.txt": "mine"}


def test_missing_or_invalid_stack_file_is_reported_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "Pulumi.wrong.yaml"
    wrong.write_text("config:\n  cloister:customer: acme\n  cloister:modles: []\n")

    for stack, message in (("nowhere", "Pulumi.nowhere.yaml cannot be read"), (str(wrong), "cloister:modles")):
        assert main(["--stack", stack, "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
