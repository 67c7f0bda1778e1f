import re
import textwrap
from typing import Any

import pytest
import yaml

from infra import config_reference, network_drawing
from infra.config_schema import SECRET_KEYS, StackFile, sections_of
from infra.config_sections import Section
from tests.infra.previewed_stacks import ROOT, changed, parse, stack_text

OPERATE = (ROOT / "docs" / "operate.md").read_text()


def keys(section: type[Section]) -> set[str]:
    inner = [keys(each) for field in section.model_fields.values() for each in sections_of(field.annotation)]
    return set(section.model_fields).union(*inner)


def test_the_reference_page_is_what_the_schema_says() -> None:
    assert config_reference.PAGE.read_text(encoding="utf-8") == config_reference.page()


def test_the_reference_page_has_every_key_with_its_meaning_and_an_example() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\|$", config_reference.page(), re.MULTILINE)
    assert {name for name, *_ in rows} | set(SECRET_KEYS) >= keys(StackFile)
    for name, kind, default, meaning, example in rows:
        assert all((kind, default, meaning)), name
        assert example or kind == "section", name


def test_the_checks_agree_with_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_reference.main(["--check"]) == 0
    assert network_drawing.main(["--check"]) == 0
    assert capsys.readouterr().err == ""


def test_the_drawing_is_what_the_flows_say() -> None:
    assert network_drawing.PAGE.read_text(encoding="utf-8") == network_drawing.page()


def test_the_page_for_operators_names_only_keys_that_there_are() -> None:
    named = set(re.findall(r"cloister:([a-z_]+)", OPERATE))
    assert named
    assert named <= set(StackFile.model_fields) | set(SECRET_KEYS)


def test_the_page_for_operators_names_only_files_that_there_are() -> None:
    links = set(re.findall(r"\]\(([^)#:]+)\)", OPERATE))
    assert links
    assert all((ROOT / "docs" / link).exists() for link in links)


@pytest.mark.parametrize(
    "task",
    [
        "Deploy",
        "Upgrade",
        "Rotate secrets",
        "Add a model",
        "Add a pool",
        "Back up and restore",
        "Remove a customer",
        "Air gap",
    ],
)
def test_the_page_for_operators_has_a_section_for_each_task(task: str) -> None:
    assert re.search(rf"^## {task}$", OPERATE, re.MULTILINE)


def snippets(section: str, key: str) -> list[Any]:
    """The values of a stack file's key, as the blocks of a section write it."""
    text = OPERATE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4,}.*\n?)+", text, re.MULTILINE)]
    return [yaml.safe_load(block)[f"cloister:{key}"] for block in blocks if block.startswith(f"cloister:{key}:")]


def test_a_model_as_the_page_writes_it_is_right() -> None:
    name = "v100-and-a10g"
    values = changed(name, models=snippets("Add a model", "models")[0])
    assert list(parse(values).catalogue.models) == ["llama-3.1-8b"]


def test_a_pool_as_the_page_writes_it_is_right() -> None:
    example = stack_text("v100-and-a10g").values
    dev = stack_text().values
    values = changed(
        node_pools=dev["node_pools"] | snippets("Add a pool", "node_pools")[0],
        images=dev["images"] | {name: example["images"][name] for name in ("ray_v100", "device_plugin")},
        device_plugin={"install": True},
        models=[*dev["models"], example["models"][0]],
    )
    assert "v100" in parse(values).file.node_pools.model_dump(exclude_none=True)


def test_a_backup_and_a_recovery_as_the_page_writes_them_are_right() -> None:
    backup, recovery = snippets("Back up and restore", "database")
    for written in (backup, recovery):
        parse(changed("air-gap", database=written), stack_text("air-gap").secret_keys)
    assert recovery["recovery"]["from_server"] == "database"
