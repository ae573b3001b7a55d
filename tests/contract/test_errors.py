"""Errors are sorted by what the caller must do."""

import pytest

from pykvcache_contract import errors


def all_errors() -> list[type[Exception]]:
    return [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_every_error_has_the_one_root_and_says_what_to_do():
    assert len(all_errors()) == 8
    for error in all_errors():
        assert issubclass(error, errors.PyKVCacheError)
        assert error.__doc__


def test_no_error_is_another_so_that_the_order_of_except_clauses_does_not_matter():
    leaves = [error for error in all_errors() if error is not errors.PyKVCacheError]
    assert [] == [(a, b) for a in leaves for b in leaves if a is not b and issubclass(a, b)]


def test_a_wrong_option_is_a_value_error_for_callers_that_know_nothing_of_us():
    with pytest.raises(ValueError, match="staging"):
        raise errors.ConfigurationError("staging")
