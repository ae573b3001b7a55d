"""How namespaces share a node's pool: bounds that hold for any history, and what tenants see."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_sidecar.node.shares import Holding, divide, keep_free, share

SIZES = st.integers(0, 10_000)
HOLDINGS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.builds(Holding, st.none() | SIZES, st.none() | SIZES.map(lambda size: size + 1)),
    min_size=1,
    max_size=12,
)


class Tenant:
    """A namespace that writes until its limit or its need, and an evictor that follows."""

    def __init__(self, need: int, used: int = 0) -> None:
        self.need = need
        self.used = used
        self.limit: int | None = None

    def live(self) -> None:
        limit = self.limit or 0
        if self.used > 0.9 * limit:
            self.used = min(self.used, int(0.8 * limit))
        self.used = min(max(self.used, self.need), max(self.used, int(0.9 * limit)))


def settle(capacity: int, tenants: dict[str, Tenant], rounds: int = 200) -> None:
    for _ in range(rounds):
        limits = share(capacity, {name: Holding(tenant.used, tenant.limit) for name, tenant in tenants.items()})
        assert sum(limits.values()) <= capacity
        for name, limit in limits.items():
            tenants[name].limit = limit
            tenants[name].live()


@pytest.mark.slow
@given(st.integers(1_000, 100_000), HOLDINGS)
def test_limits_never_add_up_to_more_than_the_capacity(capacity, holdings):
    limits = share(capacity, holdings)
    assert limits.keys() == holdings.keys()
    assert min(limits.values()) >= 1
    assert sum(limits.values()) <= capacity


@pytest.mark.slow
@given(st.integers(1_000, 100_000), HOLDINGS)
def test_a_limit_falls_at_most_to_what_lies_there_unless_the_capacity_was_lowered(capacity, holdings):
    if sum(holding.limit_bytes or 0 for holding in holdings.values()) > capacity:
        return
    if any(holding.limit_bytes is None or holding.used_bytes is None for holding in holdings.values()):
        return
    limits = share(capacity, holdings)
    for name, holding in holdings.items():
        assert limits[name] >= min(holding.limit_bytes, holding.used_bytes)


@pytest.mark.slow
@given(st.integers(10_000, 100_000), st.lists(st.integers(0, 100_000), min_size=1, max_size=8))
def test_bytes_held_never_exceed_the_capacity_whoever_needs_how_much(capacity, needs):
    tenants = {str(number): Tenant(need) for number, need in enumerate(needs)}
    for _ in range(60):
        settle(capacity, tenants, rounds=1)
        assert sum(tenant.used for tenant in tenants.values()) <= capacity


def test_one_tenant_has_all_of_it():
    assert {"only": 1000} == share(1000, {"only": Holding(None)})
    assert {"only": 1001} == share(1001, {"only": Holding(900, 1000)})


def test_a_busy_tenant_takes_what_an_idle_one_leaves_and_gives_it_back_when_that_one_wakes():
    tenants = {"busy": Tenant(10_000), "idle": Tenant(50)}
    settle(1000, tenants)
    assert tenants["busy"].used > 650
    assert tenants["idle"].used == 50
    tenants["idle"].need = 10_000
    settle(1000, tenants)
    assert abs(tenants["busy"].used - tenants["idle"].used) < 150
    assert min(tenant.used for tenant in tenants.values()) > 350


def test_a_tenant_who_comes_to_a_full_pool_gets_an_equal_part_in_the_end():
    tenants = {"first": Tenant(10_000)}
    settle(6400, tenants)
    tenants["second"] = Tenant(10_000)
    settle(6400, tenants)
    assert min(tenant.used for tenant in tenants.values()) > 2300


def test_small_changes_leave_the_limits_as_they_are():
    before = {"a": Holding(400, 500), "b": Holding(390, 500)}
    assert {"a": 500, "b": 500} == share(1000, before)
    assert {"a": 500, "b": 500} == share(1000, {**before, "b": Holding(430, 500)})


def test_a_lowered_capacity_holds_at_once():
    limits = share(100, {"a": Holding(400, 500), "b": Holding(400, 500)})
    assert {"a": 50, "b": 50} == limits


@pytest.mark.slow
@given(st.integers(0, 1000), st.integers(0, 1000), st.dictionaries(st.text(max_size=2), SIZES, max_size=6))
def test_all_directories_together_make_room_for_the_shortage_and_not_more(min_free, free, used):
    floors = keep_free(min_free, free_bytes=free, used=used)
    short = sum(max(0, floor - free) for floor in floors.values())
    if free >= min_free or not sum(used.values()):
        assert set(floors.values()) <= {min_free}
    else:
        assert min_free - free <= short <= min_free - free + len(used)


def test_a_write_budget_is_divided_and_none_stays_none():
    assert {"a": 1, "b": 9} == divide(10, {"a": 1, "b": 9})
    assert {"a": 0, "b": 0} == divide(0, {"a": 1, "b": 9})
    assert min(divide(1, {"a": 1, "b": 9}).values()) >= 1
