import re
import textwrap
from typing import Any

import pytest
import yaml

from infra.rendering import configuration_page, network_drawing, policies_page
from infra.rendering.generated_page import write_or_check
from infra.stack_file.secret_keys import SECRET_KEYS
from infra.stack_file.sections import StackFile
from ray_job.contract.accelerators import ACCELERATORS
from service.config_sections import Section, extra_type, sections_of
from tests.infra.previewed_stacks import ROOT, changed, parse, stack_text

HOW_TO = {page.stem: page.read_text() for page in (ROOT / "docs/how-to").glob("*.md")}


def keys(section: type[Section]) -> set[str]:
    inner = [keys(each) for field in section.model_fields.values() for each in sections_of(field.annotation)]
    if extra := extra_type(section):
        inner.append(keys(extra))
    return set(section.model_fields).union(*inner)


def test_configuration_page_is_up_to_date() -> None:
    assert configuration_page.PAGE.read_text(encoding="utf-8") == configuration_page.page()


def test_configuration_page_has_every_key_with_meaning_and_example() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\|$", configuration_page.page(), re.MULTILINE)
    assert {name for name, *_ in rows} | set(SECRET_KEYS) >= keys(StackFile)
    for name, kind, default, meaning, example in (row for row in rows if row[0] not in ACCELERATORS):
        assert all((kind, default, meaning)), name
        assert example or "section" in kind, name


def test_checks_accept_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    for module in (configuration_page, network_drawing, policies_page):
        assert write_or_check(module.PAGE, module.page(), ["--check"], module=module.__name__) == 0
    assert capsys.readouterr().err == ""


def test_policies_page_is_up_to_date() -> None:
    assert policies_page.PAGE.read_text(encoding="utf-8") == policies_page.page()


def test_policy_section_of_the_how_to_is_valid() -> None:
    [policy] = snippets("evidence", "policy")
    assert parse(changed("air-gap", policy=policy), stack_text("air-gap").secret_keys).file.policy.exceptions


def test_drawing_is_up_to_date() -> None:
    assert network_drawing.PAGE.read_text(encoding="utf-8") == network_drawing.page()


@pytest.mark.parametrize("page", HOW_TO)
def test_how_to_names_existing_keys_only(page: str) -> None:
    assert set(re.findall(r"cloister:([a-z_]+)", HOW_TO[page])) <= set(StackFile.model_fields) | set(SECRET_KEYS)


def snippets(page: str, key: str) -> list[Any]:
    """Return the values of a stack file's key in the indented blocks of a how-to."""
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4,}.*\n?)+", HOW_TO[page], re.MULTILINE)]
    return [yaml.safe_load(block)[f"cloister:{key}"] for block in blocks if block.startswith(f"cloister:{key}:")]


def test_model_of_the_how_to_is_valid() -> None:
    name = "v100-and-a10g"
    values = changed(name, models=snippets("add-a-model", "models")[0])
    assert list(parse(values).catalogue) == ["llama-3.1-8b"]


def test_pool_of_the_how_to_is_valid() -> None:
    example = stack_text("v100-and-a10g").values
    dev = stack_text().values
    v100, l40s = snippets("add-a-node-pool", "node_pools")
    values = changed(
        node_pools=dev["node_pools"] | v100 | l40s,
        images=dev["images"] | {name: example["images"][name] for name in ("ray_v100", "ray_cuda13", "device_plugin")},
        device_plugin={"install": True},
        models=[*dev["models"], example["models"][0], example["models"][1] | {"accelerator": "l40s", "concurrency": 1}],
    )
    assert {"v100", "l40s"} <= set(parse(values).file.node_pools.model_dump(exclude_none=True))


def test_kuberay_of_the_how_to_is_valid() -> None:
    [kuberay] = snippets("deploy", "kuberay")
    assert parse(changed(kuberay=kuberay)).file.kuberay.chart.skip_crds


def test_monitoring_of_the_how_to_is_valid() -> None:
    [written] = snippets("monitoring", "monitoring")
    monitoring = parse(changed(monitoring=written)).file.monitoring
    assert monitoring is not None
    assert monitoring.dashboards


def test_backup_and_recovery_of_the_how_to_are_valid() -> None:
    backup, recovery = snippets("back-up-and-restore", "database")
    for written in (backup, recovery):
        parse(changed("air-gap", database=written), stack_text("air-gap").secret_keys)
    assert recovery["recovery"]["from_server"] == "database"
