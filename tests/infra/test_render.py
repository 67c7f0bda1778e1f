"""`make render`: one file for each manifest, always the same, and no secret in any of them."""

from pathlib import Path

import pytest
import yaml

from infra.manifests import manifests
from infra.recording import Recording
from infra.render import HIDDEN, INDEX, RenderError, main, record_stack, rendered, write
from infra.stack_file import SHOWN_SECRET

ROOT = Path(__file__).parents[2]
DEV = str(ROOT / "Pulumi.dev.yaml")


def read(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_every_resource_is_one_file_without_a_secret(example: Recording) -> None:
    files = rendered(example)

    assert len(files) == len(manifests(example))
    secrets = {name: text for name, text in files.items() if "/secret-" in name}
    assert secrets
    assert all(HIDDEN in text for text in secrets.values())
    assert not any(SHOWN_SECRET in text for text in files.values())


def test_two_runs_write_the_same_yaml() -> None:
    first, second = rendered(record_stack(Path(DEV))), rendered(record_stack(Path(DEV)))

    assert first == second
    for text in first.values():
        assert {"apiVersion", "kind", "metadata"} <= yaml.safe_load(text).keys()


def test_the_command_writes_the_files_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stack", DEV, "--out", str(tmp_path / "out")]) == 0

    files = read(tmp_path / "out")
    assert "cloister-acme-dev/deployment-api.yaml" in files
    assert f"{len(files) - 1} manifests" in capsys.readouterr().out


def test_a_second_run_removes_what_is_not_made_any_more(tmp_path: Path) -> None:
    write({"a/one.yaml": "1", "a/two.yaml": "2", "b/three.yaml": "3"}, tmp_path)
    write({"a/two.yaml": "4"}, tmp_path)

    assert read(tmp_path) == {"a/two.yaml": "4", INDEX: "a/two.yaml\n"}
    assert not (tmp_path / "b").exists()


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(RenderError, match="were not rendered"):
        write({"a.yaml": "1"}, tmp_path)

    assert read(tmp_path) == {"notes.txt": "mine"}


def test_a_stack_file_that_is_missing_or_wrong_is_told_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "Pulumi.wrong.yaml"
    wrong.write_text("config:\n  cloister:customer: acme\n  cloister:modles: []\n")

    for stack, message in (("nowhere", "Pulumi.nowhere.yaml cannot be read"), (str(wrong), "cloister:modles")):
        assert main(["--stack", stack, "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
