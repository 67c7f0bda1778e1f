"""Evidence about a stack: what it shows, what it never shows, and that it verifies itself."""

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from infra.evidence.__main__ import main
from infra.evidence.oscal import VERSION
from infra.stack_file.secret_keys import SHOWN_SECRET
from tests.infra.exported_state import CIPHERTEXT, write_state
from tests.infra.mutations import Mutation, mutated
from tests.infra.previewed_stacks import ROOT, preview

KEY = "ab" * 32
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[45][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return write_state(tmp_path / "state.json", preview("air-gap"))


def content(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "evidence.json").read_text())
    return found


def test_state_and_stack_file_have_the_same_findings(tmp_path: Path, state: Path) -> None:
    stack_file = str(ROOT / "docs/stacks/Pulumi.air-gap.yaml")
    assert main(["write", "--stack-file", stack_file, "--out", str(tmp_path / "file")]) == 0
    assert main(["write", "--state", str(state), "--out", str(tmp_path / "state")]) == 0

    found = [
        {each["id"]: each["status"] for each in content(tmp_path / folder)["policies"]}  # type: ignore[attr-defined]
        for folder in ("file", "state")
    ]
    assert found[0] == found[1]
    assert "2026-01-02T03:04:05Z" in (tmp_path / "state" / "report.md").read_text()


def test_report_has_no_secret_script_or_link_to_another_file(tmp_path: Path, state: Path) -> None:
    text = state.read_text().replace(f'"ciphertext": "{CIPHERTEXT}"', '"plaintext": "s3cret-of-the-state"')
    state.write_text(text)
    main(["write", "--state", str(state), "--out", str(tmp_path / "out")])

    everything = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "s3cret-of-the-state" not in everything
    assert SHOWN_SECRET not in everything
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert "CLO-NET-001" in page
    assert "NOT signed" in page
    ET.parse(tmp_path / "out" / "network.svg")  # noqa: S314 - written by this test


def test_tampered_state_turns_red(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = Mutation(
        policy="services_stay_inside",
        resource="Service api",
        change=lambda body: body["spec"].update(type="LoadBalancer"),
    )
    tampered = mutated(preview("air-gap"), change)
    assert tampered is not None
    path = write_state(tmp_path / "state.json", tampered)

    assert main(["write", "--state", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "1 of them mandatory: CLO-NET-003" in capsys.readouterr().out


def test_plain_secret_in_a_state_turns_red_and_is_not_shown(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads(state.read_text())
    secret = next(each for each in raw["deployment"]["resources"] if each["type"].endswith(":Secret"))
    secret["inputs"]["stringData"] = {"key": "s3cret"}
    state.write_text(json.dumps(raw))

    assert main(["write", "--state", str(state), "--out", str(tmp_path / "out")]) == 1
    assert "CLO-SEC-002" in capsys.readouterr().out
    assert "s3cret" not in "".join(path.read_text() for path in (tmp_path / "out").iterdir())


def test_two_reports_show_exactly_the_change(tmp_path: Path, state: Path) -> None:
    main(["write", "--state", str(state), "--out", str(tmp_path / "old")])
    change = Mutation(policy="", resource="Service api", change=lambda body: body["spec"].update(type="NodePort"))
    changed = mutated(preview("air-gap"), change)
    assert changed is not None
    path = write_state(tmp_path / "new.json", changed)
    main(["write", "--state", str(path), "--out", str(tmp_path / "new"), "--since", str(tmp_path / "old")])

    found = json.loads((tmp_path / "new" / "changes.json").read_text())
    assert [(each["what"], each["where"], each["after"]) for each in found] == [
        ("policy", "CLO-NET-003", "not met"),
        ("Service cloister-umbra-prod/api", "spec.type", "NodePort"),
    ]


def test_one_changed_byte_of_any_file_fails_verification(
    tmp_path: Path, state: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    main(["write", "--state", str(state), "--out", str(folder), "--key", str(key)])
    public = tmp_path / "public.pem"
    public.write_text((folder / "public-key.pem").read_text())
    verify = ["verify", str(folder), "--public-key", str(public)]
    assert main(verify) == 0

    for path in sorted(folder.iterdir()):
        before = path.read_bytes()
        place = len(before) // 2
        path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        # The copy of the public key proves nothing, and is not read.
        assert main(verify) == (0 if path.name == "public-key.pem" else 1), path.name
        path.write_bytes(before)
    (folder / "added.txt").write_text("")
    assert main(verify) == 1
    assert "added.txt was added" in capsys.readouterr().err


def test_manifest_of_another_key_or_without_a_signature_fails_verification(
    tmp_path: Path, state: Path, key: Path
) -> None:
    folder, other = tmp_path / "out", tmp_path / "other"
    main(["write", "--state", str(state), "--out", str(folder), "--key", str(key)])
    os.truncate(key, 0)
    key.write_text("cd" * 32)
    main(["write", "--state", str(state), "--out", str(other), "--key", str(key)])
    public = str(folder / "public-key.pem")
    assert main(["verify", str(other), "--public-key", public]) == 1

    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"envelope": None}))
    assert main(["verify", str(folder), "--public-key", public]) == 1


def test_changed_report_is_no_base_for_a_comparison(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["write", "--state", str(state), "--out", str(tmp_path / "old")])
    (tmp_path / "old" / "evidence.json").write_text("{}")

    assert main(["write", "--state", str(state), "--out", str(tmp_path / "n"), "--since", str(tmp_path / "old")]) == 1
    assert "evidence.json was changed" in capsys.readouterr().err


def test_file_that_is_no_state_is_refused_without_quoting_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.json"
    for text in ('{"deployment": {"resources": "s3cret"}}', "s3cret", '{"deployment": {}}'):
        path.write_text(text)
        assert main(["write", "--state", str(path), "--out", str(tmp_path / "out")]) == 1
    found = capsys.readouterr().err
    assert "pulumi stack export" in found
    assert "s3cret" not in found


def test_oscal_documents_keep_the_rules_of_their_models(tmp_path: Path, state: Path) -> None:
    main(["write", "--state", str(state), "--out", str(tmp_path / "out")])

    results = json.loads((tmp_path / "out" / "assessment-results.json").read_text())["assessment-results"]
    components = json.loads((tmp_path / "out" / "component-definition.json").read_text())["component-definition"]
    for document in (results, components):
        assert document["metadata"]["oscal-version"] == VERSION
        assert set(document["metadata"]) == {"title", "last-modified", "version", "oscal-version"}
        assert all(UUID.fullmatch(each) for each in re.findall(r'"uuid": "([^"]*)"', json.dumps(document)))
    [result] = results["results"]
    assert {"uuid", "title", "description", "start", "reviewed-controls"} <= set(result)
    observed = {each["uuid"]: each for each in result["observations"]}
    assert len(observed) == len(result["observations"])
    assert all(each["methods"] == ["EXAMINE"] and each["collected"] for each in observed.values())
    for finding in result["findings"]:
        assert finding["target"]["type"] == "objective-id"
        assert finding["target"]["status"]["state"] in {"satisfied", "not-satisfied"}
        assert {each["observation-uuid"] for each in finding["related-observations"]} <= set(observed)
    [implementation] = components["components"][0]["control-implementations"]
    controls = [each["control-id"] for each in implementation["implemented-requirements"]]
    assert {"sc-7", "sc-7.5"} <= set(controls)
    assert len(controls) == len(set(controls))
