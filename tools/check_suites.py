#!/usr/bin/env python3
"""Sum up the test suites of one run and fail if one of them proved nothing.

Usage: check_suites.py REPORT_DIR SUITE …          reads REPORT_DIR/SUITE.xml (JUnit, as pytest writes it)

A suite whose report is missing, that ran no test or skipped all of them, is a failure: green must mean tested. Prints
one line for each suite, every skip with its reason, every failure, and last `N passed, N failed, N skipped`.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Suite:
    """What one report says."""

    name: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    problem: str = ""

    @property
    def executed(self) -> int:
        return self.passed + len(self.failed)


def first_line(text: str | None) -> str:
    """Return a message without its traceback, and short enough to read a list of them."""
    return (text or "no reason given").strip().partition("\n")[0][:200]


def read_suite(path: Path) -> Suite:
    """Read one report; what is wrong with it as a whole goes to `problem`."""
    suite = Suite(path.stem)
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        suite.problem = f"no readable report: {error}"
        return suite
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        suite.seconds += float(case.get("time", 0))
        broken = [*case.findall("failure"), *case.findall("error")]
        if broken:
            suite.failed.append(f"{name}: {first_line(broken[0].get('message'))}")
        elif (skip := case.find("skipped")) is not None:
            suite.skipped[first_line(skip.get("message"))] += 1
        else:
            suite.passed += 1
    if not suite.executed:
        suite.problem = "all tests were skipped" if suite.skipped else "ran no test"
    return suite


def report(suites: list[Suite]) -> bool:
    """Print the summary; return whether every suite is good."""
    for suite in suites:
        counts = f"{suite.passed} passed, {len(suite.failed)} failed, {suite.skipped.total()} skipped"
        print(f"{suite.name:14} {counts}, {suite.seconds:.0f} s")
        for reason, count in suite.skipped.most_common():
            print(f"    skipped {count} ×: {reason}")
        for failure in suite.failed:
            print(f"    FAILED {failure}")
        if suite.problem:
            print(f"    FAILED {suite.problem}")
    failed = sum(len(suite.failed) + bool(suite.problem) for suite in suites)
    skipped = sum(suite.skipped.total() for suite in suites)
    print(f"{sum(suite.passed for suite in suites)} passed, {failed} failed, {skipped} skipped")
    return not failed


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.exit(0 if report([read_suite(folder / f"{name}.xml") for name in sys.argv[2:]]) else 1)
