"""The webhook's certificates over years: what API servers trust verifies what replicas serve, whatever happens."""

import asyncio
import base64
import bisect
import functools
import itertools
import random
from datetime import datetime, timedelta, timezone

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from pykvcache_operator import certifier as module
from pykvcache_operator import paths
from pykvcache_operator.certificates import (
    CERTIFICATE,
    KEY,
    dns_names,
    is_issued,
    is_pair,
    is_valid,
    key_to_pem,
    make_authority,
    make_serving,
    read_certificates,
    read_key,
    to_pem,
)
from pykvcache_operator.certifier import AUTHORITY_SECRET, LOOK_SECONDS, SERVING_SECRET, WEBHOOK, Certifier
from pykvcache_operator.client import ApiError
from pykvcache_operator.rotation import SETTLE_SECONDS

NAMESPACE, SERVICE, CONFIGURATION = "pykvcache-system", "pykvcache-webhook", "pykvcache-webhook"
NAME = f"{SERVICE}.{NAMESPACE}.svc"
AUTHORITY = paths.secret(NAMESPACE, AUTHORITY_SECRET)
SERVING = paths.secret(NAMESPACE, SERVING_SECRET)
WEBHOOKS = paths.webhook_configuration(CONFIGURATION)
API_SERVER_LAG = 60.0
KUBELET_LAG = 120.0
"""Seconds after which the last API server has read a configuration, and the last kubelet a Secret."""
DAY = timedelta(days=1)

issued = functools.cache(lambda certificate, by: is_issued(certificate, by=by))
certificates_in = functools.cache(read_certificates)


class Killed(BaseException):
    """The operator's process ends here."""


class Store:
    """As much of an API server as the certifier uses, with conflicts; may kill or refuse at any request.

    Attributes:
        trouble: called before and after each request takes effect; raises what goes wrong there.
        pause: awaited before each request, for others to come in between.
    """

    def __init__(self):
        self.objects = {}
        self.version = 0
        self.trouble = lambda: None
        self.pause = lambda: asyncio.sleep(0)
        self.writes = 0
        self.after_write = lambda: None

    def install(self, *others):
        webhooks = [{"name": name, "clientConfig": {"service": {}}} for name in (*others, WEBHOOK)]
        self.put(WEBHOOKS, {"metadata": {"name": CONFIGURATION}, "webhooks": webhooks})

    def put(self, path, document):
        self.version += 1
        metadata = {**document["metadata"], "resourceVersion": str(self.version)}
        self.objects[path] = {**document, "metadata": metadata}
        return self.objects[path]

    async def get(self, path):
        await self.pause()
        self.trouble()
        if path not in self.objects:
            raise ApiError("missing", status=404)
        return self.objects[path]

    async def create(self, path, body):
        await self.pause()
        self.trouble()
        path = f"{path}/{body['metadata']['name']}"
        if path in self.objects:
            raise ApiError("exists", status=409)
        return self._written(path, body)

    async def merge(self, path, body):
        await self.pause()
        self.trouble()
        former = self._current(path, body["metadata"]["resourceVersion"])
        return self._written(path, {**former, "data": {**former.get("data", {}), **body["data"]}})

    async def edit(self, path, steps):
        await self.pause()
        self.trouble()
        version, name, bundle = steps
        former = self._current(path, version["value"])
        index = int(bundle["path"].split("/")[2])
        assert (name["op"], name["value"], former["webhooks"][index]["name"]) == ("test", WEBHOOK, WEBHOOK)
        entry = {"name": WEBHOOK, "clientConfig": {"service": {}, "caBundle": bundle["value"]}}
        webhooks = [entry if number == index else other for number, other in enumerate(former["webhooks"])]
        return self._written(path, {**former, "webhooks": webhooks})

    def _current(self, path, version):
        if self.objects.get(path, {"metadata": {"resourceVersion": ""}})["metadata"]["resourceVersion"] != version:
            raise ApiError("conflict", status=409)
        return self.objects[path]

    def _written(self, path, document):
        self.writes += 1
        answer = self.put(path, document)
        self.after_write()
        self.trouble()
        return answer

    @property
    def bundle(self):
        webhooks = self.objects.get(WEBHOOKS, {}).get("webhooks", [])
        texts = [each["clientConfig"].get("caBundle", "") for each in webhooks if each["name"] == WEBHOOK]
        return base64.b64decode(texts[0]) if texts else b""

    @bundle.setter
    def bundle(self, value):
        entry = {"name": WEBHOOK, "clientConfig": {"service": {}, "caBundle": base64.b64encode(value).decode()}}
        self.put(WEBHOOKS, {"metadata": {"name": CONFIGURATION}, "webhooks": [entry]})

    def data(self, path):
        return {k: base64.b64decode(v) for k, v in self.objects.get(path, {}).get("data", {}).items()}

    def set_data(self, path, **data):
        """Write some keys of a Secret as a person would: `tls_crt` stands for `tls.crt`."""
        former = self.objects[path]
        changes = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
        self.put(path, {**former, "data": {**former["data"], **changes}})


class Late:
    """What somebody sees of a value that changes, some seconds late."""

    def __init__(self, lag):
        self.lag, self._times, self._values = lag, [], []

    def note(self, now, value):
        if not self._values or self._values[-1] != value:
            self._times.append(now)
            self._values.append(value)

    def seen(self, now):
        index = bisect.bisect_right(self._times, now - self.lag)
        return self._values[index - 1] if index else None


class World:
    """A cluster with one operator, API servers and webhook replicas; time passes only here."""

    def __init__(self, seed=0):
        self.chance = random.Random(seed)
        self.seed = seed
        self.store = Store()
        self.store.install()
        self.now = datetime(2026, 1, 1, tzinfo=timezone.utc)
        self.steady = 0.0
        self.skew = timedelta(0)
        """By how much the operator's clock is wrong."""
        self.api_servers = [Late(API_SERVER_LAG * part) for part in (0, 0.5, 1)]
        self.kubelets = [Late(KUBELET_LAG * part) for part in (0, 0.5, 1)]
        self.in_use = [None] * len(self.kubelets)
        self.served, self.authorities = set(), set()
        self.store.after_write = self._note
        self.restart()

    def restart(self):
        self.certifier = self.operator()

    def operator(self):
        return Certifier(
            self.store,
            namespace=NAMESPACE,
            configuration=CONFIGURATION,
            service=SERVICE,
            clock=lambda: self.now + self.skew,
            monotonic=lambda: self.steady,
        )

    def look(self):
        """Let the operator look once; one that is killed meanwhile is started again."""
        try:
            return _finish(self.certifier.try_look())
        except Killed:
            self.restart()
            return False
        finally:
            self._note()

    def pass_time(self, seconds):
        self.now += timedelta(seconds=seconds)
        self.steady += seconds
        self._note()

    def settle(self, seconds=KUBELET_LAG + LOOK_SECONDS):
        """Let the operator look, and everybody see it."""
        for _ in range(int(seconds / LOOK_SECONDS)):
            self.look()
            self.pass_time(LOOK_SECONDS)

    def problems(self):
        """Return who could not verify whom, at this moment."""
        return [
            f"API server {a} cannot verify replica {r} at {self.now}, seed {self.seed}"
            for (a, api_server), (r, certificate) in itertools.product(
                enumerate(self.api_servers), enumerate(self.in_use)
            )
            if certificate is not None and not self._verifies(api_server.seen(self.steady), certificate)
        ]

    def _verifies(self, bundle, certificate):
        issuers = [each for each in certificates_in(bundle) if is_valid(each, self.now)]
        is_good = is_valid(certificate, self.now) and NAME in dns_names(certificate)
        return is_good and any(issued(certificate, each) for each in issuers)

    def _note(self):
        for api_server in self.api_servers:
            api_server.note(self.steady, self.store.bundle)
        data = self.store.data(SERVING)
        for index, kubelet in enumerate(self.kubelets):
            kubelet.note(self.steady, (data.get(CERTIFICATE, b""), data.get(KEY, b"")))
            self.in_use[index] = self._loaded(*(kubelet.seen(self.steady) or (b"", b""))) or self.in_use[index]
        self.served |= set(certificates_in(data.get(CERTIFICATE)))
        self.authorities |= set(certificates_in(self.store.data(AUTHORITY).get(CERTIFICATE)))

    def _loaded(self, certificate, key):
        """Return what a replica takes into use: a pair that fits, and else nothing new."""
        return _pair(certificate, key)


def _finish(coroutine):
    """Run a coroutine that waits for nothing, without an event loop: thousands of looks take seconds then."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value


@functools.cache
def _pair(certificate, key):
    found, pair = certificates_in(certificate), read_key(key)
    return found[0] if found and pair is not None and is_pair(found[0], pair) else None


@pytest.fixture
def world():
    world = World()
    world.settle()
    assert world.problems() == []
    return world


def test_the_first_look_makes_what_api_servers_and_replicas_need(world):
    assert world.store.objects[SERVING]["type"] == "kubernetes.io/tls"
    assert world.store.data(SERVING)["ca.crt"] == world.store.bundle
    assert None not in world.in_use
    assert set(world.certifier.expiries) == {"authority", "serving"}


def test_a_look_that_finds_all_well_writes_nothing(world):
    before = world.store.writes
    for _ in range(20):
        world.look()
        world.pass_time(DAY.total_seconds())
    assert world.store.writes == before


def test_other_webhooks_of_the_configuration_stay_as_they_are():
    world = World()
    world.store.install("first.example.com", "second.example.com")
    world.look()
    first, second, ours = world.store.objects[WEBHOOKS]["webhooks"]
    assert [first, second] == [
        {"name": f"{n}.example.com", "clientConfig": {"service": {}}} for n in ("first", "second")
    ]
    assert ours["clientConfig"]["caBundle"]


def test_without_a_configuration_certificates_are_kept_and_it_is_said_once(caplog):
    world = World()
    del world.store.objects[WEBHOOKS]
    for _ in range(100):
        world.look()
        world.pass_time(DAY.total_seconds())
    assert len(world.served) > 1
    assert [record.message for record in caplog.records if "nobody calls" in record.message] == [
        "nobody calls the webhook: there is no MutatingWebhookConfiguration pykvcache-webhook with a webhook "
        "pods.pykvcache.io; certificates are kept all the same"
    ]
    world.store.install()
    world.settle()
    assert world.problems() == []


def test_a_new_authority_signs_only_when_every_api_server_knows_it(world):
    (former,) = world.served
    world.pass_time(timedelta(days=250).total_seconds())  # nobody renewed anything: both are due, and one is expired
    world.settle()
    world.pass_time(timedelta(days=245).total_seconds())
    authorities, served = set(world.authorities), set(world.served)
    world.look()
    assert len(world.authorities) == len(authorities) + 1
    seconds = 0.0
    while world.served == served:
        world.pass_time(LOOK_SECONDS)
        seconds += LOOK_SECONDS
        world.look()
    assert seconds >= SETTLE_SECONDS or former not in world.in_use


def test_the_earlier_authority_leaves_a_day_after_the_last_certificate_that_it_signed(world):
    for _ in range(243 * 4 + 8):
        world.look()
        world.pass_time(DAY.total_seconds() / 4)
    assert len(world.authorities) == 2
    world.settle(SETTLE_SECONDS + LOOK_SECONDS)
    assert len(certificates_in(world.store.bundle)) == 1


def test_an_operator_that_cannot_write_says_so_once_and_counts(world, caplog):
    del world.store.objects[SERVING]

    def refuse():
        raise ApiError("get secrets: 403 not allowed", status=403)

    world.store.trouble = refuse
    assert not world.look()
    assert not world.look()
    assert world.certifier.failures == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "roles must allow" in caplog.text
    world.store.trouble = lambda: None
    assert world.look()
    assert SERVING in world.store.objects


def test_a_defect_of_ours_ends_nothing(world, monkeypatch, caplog):
    def fail(*arguments, **more):
        raise RuntimeError("a defect")

    monkeypatch.setattr(module, "decide_authority", fail)
    assert not world.look()
    assert "a defect" in caplog.text
    assert world.certifier.failures == 1


def own_authority(world):
    return make_authority(world.now - timedelta(days=1))


def replace_authority(world):
    authority = own_authority(world)
    world.store.set_data(AUTHORITY, tls_crt=to_pem([authority.certificate]), tls_key=key_to_pem(authority.key))


def replace_serving(world):
    authority = own_authority(world)
    data = {**make_serving(authority, name=NAME, now=world.now), "ca.crt": to_pem([authority.certificate])}
    world.store.set_data(SERVING, **{key.replace(".", "_"): value for key, value in data.items()})


OTHER_KEY = key_to_pem(ec.generate_private_key(ec.SECP256R1()))
HARMLESS = {
    "the authority is deleted": lambda world: world.store.objects.pop(AUTHORITY),
    "the authority is garbage": lambda world: world.store.set_data(AUTHORITY, tls_crt=b"garbage"),
    "the authority's key is garbage": lambda world: world.store.set_data(AUTHORITY, tls_key=b"garbage"),
    "the authority's key is another": lambda world: world.store.set_data(AUTHORITY, tls_key=OTHER_KEY),
    "another authority by hand": replace_authority,
    "the certificate is deleted": lambda world: world.store.objects.pop(SERVING),
    "the certificate is garbage": lambda world: world.store.set_data(SERVING, tls_crt=b"garbage"),
    "the certificate's key is another": lambda world: world.store.set_data(SERVING, tls_key=OTHER_KEY),
    "the certificate's bundle is garbage": lambda world: world.store.set_data(SERVING, ca_crt=b"garbage"),
}
HARMFUL = {
    "both Secrets are deleted": lambda world: [world.store.objects.pop(AUTHORITY), world.store.objects.pop(SERVING)],
    "the bundle is wiped": lambda world: setattr(world.store, "bundle", b""),
    "the bundle is garbage": lambda world: setattr(world.store, "bundle", b"garbage"),
    "the configuration is made anew": lambda world: world.store.install("other.example.com"),
    "another certificate by hand": replace_serving,
}


@pytest.mark.parametrize("what", HARMLESS)
def test_nobody_notices_when(world, what):
    HARMLESS[what](world)
    for number in range(100):
        world.look()
        assert world.problems() == []
        world.pass_time(LOOK_SECONDS if number < 50 else 3600)
        assert world.problems() == []
    assert len(certificates_in(world.store.bundle)) == 1


@pytest.mark.parametrize("what", HARMFUL)
def test_the_next_look_heals_it_when(world, what):
    HARMFUL[what](world)
    world.look()
    world.pass_time(KUBELET_LAG)
    for _ in range(200):
        assert world.problems() == []
        world.look()
        world.pass_time(LOOK_SECONDS)


class Years:
    """Time that passes in a world with an operator that is killed, refused and told wrong times."""

    def __init__(self, world, *, sabotages=()):
        self.world, self.sabotages = world, sabotages
        self.excused_until = world.steady
        world.store.trouble = self._trouble

    def pass_days(self, days):
        end = self.world.now + timedelta(days=days)
        quick = 0
        while self.world.now < end:
            writes = self.world.store.writes
            self._mischief()
            self.world.look()
            self._check()
            quick = 60 if self.world.store.writes > writes else quick - 1
            self.world.pass_time(self.world.chance.uniform(5, 40 if quick > 0 else 2 * 86_400))
            self._check()

    def _check(self):
        if self.world.steady > self.excused_until:
            assert self.world.problems() == []

    def _trouble(self):
        dice = self.world.chance.random()
        if dice < 0.03:
            raise Killed
        if dice < 0.06:
            raise ApiError("no answer")

    def _mischief(self):
        chance, world = self.world.chance, self.world
        if chance.random() < 0.02:
            world.skew = chance.choice([-DAY, timedelta(0), DAY])
        if self.sabotages and chance.random() < 0.01:
            chance.choice(self.sabotages)(world)
            trouble, world.store.trouble = world.store.trouble, lambda: None
            world.look()  # healed from here on; what may go wrong meanwhile is the other test's
            world.store.trouble = trouble
            self.excused_until = world.steady + KUBELET_LAG


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_for_years_every_api_server_verifies_every_replica(seed):
    world = World(seed)
    world.settle()
    Years(world).pass_days(2 * 365)
    assert len(world.authorities) >= 3
    assert len(world.served) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_for_years_of_sabotage_it_heals_within_a_look(seed):
    world = World(seed)
    world.settle()
    Years(world, sabotages=[*HARMLESS.values(), *HARMFUL.values()]).pass_days(365)
    world.settle()
    assert world.problems() == []


@pytest.mark.parametrize("seed", range(20))
def test_of_two_operators_that_write_at_once_neither_undoes_the_other(seed):
    world = World(seed)
    chance = world.chance
    if chance.random() < 0.7:
        world.settle()
        world.pass_time(timedelta(days=chance.choice([1, 61, 244])).total_seconds())
        if chance.random() < 0.5:
            chance.choice(list(HARMLESS.values()))(world)

    async def pause():
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)

    def check():
        found = certificates_in(world.store.data(SERVING).get(CERTIFICATE))
        bundle = certificates_in(world.store.bundle)
        signs = certificates_in(world.store.data(AUTHORITY).get(CERTIFICATE))
        if found and not any(issued(found[0], each) for each in bundle):
            assert not is_valid(found[0], world.now) or not _pair(*pair_of(world)), f"seed {seed}"
        assert signs, f"seed {seed}"

    async def both():
        operators = [world.operator() for _ in range(2)]
        for _ in range(4):
            await asyncio.gather(*(each.try_look() for each in operators))

    world.store.pause, world.store.after_write = pause, check
    asyncio.run(both())
    (serving,) = certificates_in(world.store.data(SERVING)[CERTIFICATE])
    assert any(issued(serving, each) for each in certificates_in(world.store.bundle)), f"seed {seed}"
    writes = world.store.writes
    world.restart()
    world.look()
    assert world.store.writes == writes, f"seed {seed}"


def pair_of(world):
    data = world.store.data(SERVING)
    return data[CERTIFICATE], data[KEY]
