"""Check releases of vLLM against the table of names we use.

Usage: python -m compat [--wheel VERSION] … [--installed SITE_PACKAGES] … [--cache DIR] [--report JUNIT_XML]

A release that cannot be read is a failure too: a check that did not run proves nothing.
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from compat.check import check, load_table
from compat.declarations import Package
from compat.sources import Installed, Source, SourceError, Wheel


def sources(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Source]]]:
    """Yield what to call each wanted release and how to open it."""
    for folder in options.installed:
        yield f"installed in {folder}", partial(Installed, folder)
    for version in options.wheel:
        yield f"wheel {version}", partial(Wheel, version, options.cache)


def write_report(path: Path, problems: dict[str, list[str]]) -> None:
    """Write a JUnit report with one case for each release."""
    suite = ElementTree.Element("testsuite", name="compat")
    for title, failures in problems.items():
        case = ElementTree.SubElement(suite, "testcase", classname="compat", name=title, time="0")
        if failures:
            ElementTree.SubElement(case, "failure", message="; ".join(failures))
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path)


def main() -> int:
    """Print one line for each release and one for each problem; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="append", default=[], help="release to read from the package index")
    parser.add_argument("--installed", action="append", default=[], type=Path, help="site-packages with vLLM")
    parser.add_argument("--cache", type=Path, default=Path(".cache/compat"))
    parser.add_argument("--report", type=Path, help="write the result here too")
    options = parser.parse_args()
    uses = load_table()
    problems: dict[str, list[str]] = {}
    for title, open_source in sources(options):
        try:
            source = open_source()
            count, failures = check(Package(source), source.version, uses)
            print(f"vLLM {source.version:8} {count} uses checked, {len(failures)} problems ({title})")
        except SourceError as error:
            failures = [f"could not be read: {error}"]
            print(f"vLLM {title}: not checked")
        problems[title] = failures
        for failure in failures:
            print(f"    {failure}")
    if options.report:
        write_report(options.report, problems)
    return 1 if any(problems.values()) or not problems else 0


if __name__ == "__main__":
    sys.exit(main())
