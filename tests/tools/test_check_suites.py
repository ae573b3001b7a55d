"""A run is green only if every suite executed something and nothing failed."""

import pytest

from check_suites import read_suite, report

PASS = '<testcase classname="c" name="good" time="0.5"/>'
SKIP = '<testcase classname="c" name="s" time="0"><skipped message="no ring here"/></testcase>'
FAIL = '<testcase classname="c" name="bad" time="1"><failure message="1 != 2&#10;trace"/></testcase>'
ERROR = '<testcase classname="c" name="broken" time="1"><error message="fixture"/></testcase>'


@pytest.fixture
def write(tmp_path):
    def write(name, *cases):
        path = tmp_path / f"{name}.xml"
        path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        return read_suite(path)

    return write


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def test_passes_are_summed_over_suites(write, capsys):
    assert report([write("unit", PASS, PASS, SKIP), write("engine", PASS)])
    assert last_line(capsys) == "3 passed, 0 failed, 1 skipped"


def test_skips_are_shown_with_their_reason(write, capsys):
    report([write("unit", PASS, SKIP, SKIP)])
    assert "skipped 2 ×: no ring here" in capsys.readouterr().out


@pytest.mark.parametrize("case", [FAIL, ERROR])
def test_a_failure_or_error_fails(write, capsys, case):
    assert not report([write("unit", PASS, case)])
    assert last_line(capsys) == "1 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("cases", [(), (SKIP,), (SKIP, SKIP)])
def test_a_suite_that_executed_nothing_fails(write, cases):
    assert not report([write("unit", PASS), write("engine", *cases)])


def test_a_missing_or_broken_report_fails(tmp_path):
    assert not report([read_suite(tmp_path / "gone.xml")])
    (tmp_path / "cut.xml").write_text("<testsuites><testsu")
    assert not report([read_suite(tmp_path / "cut.xml")])
