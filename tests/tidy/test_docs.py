"""The pages as tests: links lead somewhere, tables are whole, decisions are numbered, and packages are the same.

Each rule is a function from a page to complaints, and a test shows what it accepts and what it catches.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
CELL = re.compile(r"(?<!\\)\|")
SPEAKING = ("charts/", "examples/", "operator/", "sidecar/", "connector/", "contract/", "cli/", "tools/")
"""Where texts that users read name a page."""


def committed(*patterns: str) -> list[str]:
    """Return the files that are or could be committed, by their path from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({name for name in found if (ROOT / name).is_file()})


@pytest.fixture(scope="module")
def pages():
    found = {name: (ROOT / name).read_text() for name in committed("*.md")}
    assert len(found) > 20, "git lists no pages here"
    return found


def prose(text: str) -> str:
    """Return a page without code in it, whose headings and links are none."""
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    return "\n".join(line for line in lines if not line.startswith("    "))


def anchors(text: str) -> set[str]:
    """Return what links to parts of a page may name, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: str, text: str, pages: Mapping[str, str]) -> Iterator[str]:
    for target in LINK.findall(prose(text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        found = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if found not in pages and not (ROOT / found).exists():
            yield f"{path}: {target} leads nowhere"
        elif anchor and anchor not in anchors(pages.get(found, "")):
            yield f"{path}: {target} names no heading"


def uneven_tables(path: str, text: str) -> Iterator[str]:
    columns = 0
    for number, line in enumerate(text.splitlines(), 1):
        count = len(CELL.split(line)) if line.startswith("|") else 0
        if columns and count and count != columns:
            yield f"{path}:{number}: {count - 2} columns, {columns - 2} in the line above"
        columns = count


def test_every_link_leads_to_a_file_and_a_heading(pages):
    assert [] == [complaint for path, text in pages.items() for complaint in broken_links(path, text, pages)]


def test_an_anchor_is_the_heading_in_small_letters_without_punctuation():
    assert anchors("# The webhook's certificate\n\n## `A` (b)\n    # code") == {"the-webhooks-certificate", "a-b"}


def test_a_link_to_a_file_or_heading_that_is_missing_is_caught():
    pages = {
        "docs/a.md": "# One `two`\n[up](../README.md) [b](b.md#three)\n    [code](none.md)",
        "docs/b.md": "# Three",
    }
    assert [] == list(broken_links("docs/a.md", pages["docs/a.md"], pages))
    for link in ("none.md", "b.md#four", "#one", "../b.md"):
        assert len(list(broken_links("docs/a.md", f"[x]({link})", pages))) == 1


def test_every_row_of_a_table_has_the_same_columns(pages):
    assert [] == [complaint for path, text in pages.items() for complaint in uneven_tables(path, text)]


def test_a_row_with_a_column_too_many_is_caught():
    assert [] == list(uneven_tables("a.md", "| a | b |\n|---|---|\n| `x \\| y` | 1 |\n\n| c |"))
    assert len(list(uneven_tables("a.md", "| a | b |\n|---|---|\n| `x | y` | 1 |"))) == 1


def test_texts_of_charts_and_programs_name_pages_that_exist():
    named = {}
    for path in committed(*(f"{folder}*" for folder in SPEAKING)):
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue  # an archive
        named |= dict.fromkeys(re.findall(r"\bdocs/[\w/-]+\.md", text), path)
    assert named
    assert {} == {page: path for page, path in named.items() if not (ROOT / page).is_file()}


def test_decisions_are_numbered_without_a_gap_and_say_their_status():
    paths = sorted((ROOT / "docs/adr").glob("*.md"))
    assert [int(path.name[:4]) for path in paths] == list(range(1, len(paths) + 1))
    for path in paths:
        title, _, second, *_ = path.read_text().splitlines()
        assert re.match(rf"# {path.name[:4]}\.? \S", title), path
        assert re.search(r"\bStatus\b.* accepted\b", second), path


def test_decisions_that_are_named_exist():
    numbers = {path.name[:4] for path in (ROOT / "docs/adr").glob("*.md")}
    files = committed("*.py", "*.md", "*.yaml", "*.toml")
    named = {number: path for path in files for number in re.findall(r"\bADR (\d{4})\b", (ROOT / path).read_text())}
    assert named
    assert {} == {number: path for number, path in named.items() if number not in numbers}


def test_the_page_about_e2e_names_the_packages_that_ci_installs():
    script, page = (ROOT / ".ci/run").read_text(), (ROOT / "docs/e2e.md").read_text()
    installed = re.search(r'^kubernetes="(.*?)"', script, flags=re.DOTALL | re.MULTILINE)[1].split()
    command = re.search(r"apt-get install --no-install-recommends ((?:.*\\\n)*.*)", page)[1]
    assert {pair.split(":")[1] for pair in installed} == set(command.replace("\\", " ").split())
