"""Links, anchors, code paths and examples in the documentation."""

import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from service.model_catalogue import parse_catalogue

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for folder in (".", "docs", "images", "constraints", "tests/conformance")
    for page in (ROOT / folder).glob("**/*.md" if folder == "docs" else "*.md")
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_PATH = re.compile(r"`((?:docs|images|infra|ray_job|service|tests|\.ci)/[\w./-]*)`")
README_WORDS = 900


@cache
def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def target(page: Path, link: str) -> Path:
    path = link.partition("#")[0]
    return (page.parent / path).resolve() if path else page


@pytest.mark.parametrize("name", NAMES)
def test_every_relative_link_has_a_target(name: str) -> None:
    page = ROOT / name
    assert [link for link in links(page) if not target(page, link).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_anchor_is_a_heading_of_its_page(name: str) -> None:
    page = ROOT / name
    with_anchor = [link for link in links(page) if "#" in link and target(page, link).suffix == ".md"]
    assert [link for link in with_anchor if link.partition("#")[2] not in anchors(target(page, link))] == []


def test_every_page_is_reachable_from_an_index() -> None:
    linked = {target(page, link) for page in (ROOT / "README.md", ROOT / "docs/README.md") for link in links(page)}
    linked.add(ROOT / "README.md")
    assert [name for name in NAMES if (ROOT / name) not in linked] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_every_sentence_on_privacy_links_to_a_test_that_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Privacy")[2].partition("\n## ")[0]
    points = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    assert len(points) >= 6
    for point in points:
        tests = re.findall(r"\[`(test_\w+)`\]\((tests/[\w./]+\.py)\)", point)
        assert tests, point
        for name, file in tests:
            assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_code_path_exists(name: str) -> None:
    paths = CODE_PATH.findall(prose(ROOT / name))
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_terminal_picture_is_well_formed_xml() -> None:
    picture = ET.parse(ROOT / "docs/demo.svg")  # noqa: S314 - a file of this repository
    assert picture.getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_example_of_a_model_is_valid() -> None:
    example = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/models.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    assert list(parse_catalogue(yaml.safe_load(example[1]))) == ["llama-3.1-8b"]
