"""Fixtures of the tests on Kubernetes: clusters for the whole run, a namespace for each test.

`cluster` runs pods: our own, that of a kubeconfig file or kind's, as PYKVCACHE_E2E says. `local_cluster` is ours, for
tests that need the inside of a node. `api_server` is a control plane without nodes, up in seconds. `kubectl` and
`namespace` belong to whichever the test asks for. After a failure what is known about it is written to .cache/e2e.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.api_cluster import ApiCluster
from harness.binaries import Binaries, fetch_tools, find_binaries
from harness.cluster import LocalCluster
from harness.crds import install_crds
from harness.diagnose import diagnose, folder_of, keep_logs
from harness.kind import KindCluster
from harness.kubeconfig import ExternalCluster
from harness.kubectl import Kubectl
from harness.settings import DEVELOPER, REPORTS, Mode, Settings

Cluster = LocalCluster | ExternalCluster | KindCluster
TEST_LIMIT_S = 900  # a test may have to wait for an image, and for a cluster
CLUSTERS = ("api_server", "local_cluster", "cluster")  # fixtures


@contextmanager
def running(cluster):
    """Start a cluster and stop it at the end; if it does not start, keep the logs of its programs."""
    try:
        try:
            cluster.start()
        except Exception as error:
            error.add_note(f"logs: {keep_logs(cluster.logs(), REPORTS / 'start')}")
            raise
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def settings() -> Settings:
    """What the environment says."""
    return Settings.read()


@pytest.fixture(scope="session")
def binaries(settings) -> Binaries:
    """The programs of local clusters; built here only when nobody ran `python -m harness prepare`."""
    return find_binaries(settings.cache)


@pytest.fixture(scope="session")
def api_server(settings, binaries) -> Iterator[ApiCluster]:
    """A control plane without nodes, for the whole run; each test makes and deletes its own objects."""
    with running(ApiCluster(settings.state, binaries=binaries)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def crds(api_server) -> None:
    """The API `pykvcache.io` on the control plane without nodes, as this repository has it."""
    install_crds(api_server.kubectl)


@pytest.fixture(scope="session")
def cluster(request, settings) -> Iterator[Cluster]:
    """A cluster that runs pods, for the whole run."""
    if settings.mode is Mode.LOCAL:
        yield request.getfixturevalue("local_cluster")
        return
    kubectl = fetch_tools(settings.cache) / "kubectl"
    if settings.mode is Mode.KIND:
        outside: Cluster = KindCluster(settings.cache, kubectl=kubectl)
    else:
        outside = ExternalCluster(settings, kubectl=kubectl)
    with running(outside) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def local_cluster(settings, binaries) -> Iterator[LocalCluster]:
    """Our own cluster: the developer's while it is up, else one for this run."""
    if settings.mode is not Mode.LOCAL:
        pytest.skip("needs the inside of a node: PYKVCACHE_E2E=local")
    if developers := LocalCluster.attach(settings.state / DEVELOPER, binaries=binaries, cache=settings.cache):
        yield developers
        return
    with running(LocalCluster.temporary(settings.state, binaries=binaries, cache=settings.cache)) as cluster:
        yield cluster


@pytest.fixture
def asked_cluster(request) -> ApiCluster | Cluster:
    """The cluster that the test asks for by its fixture; the one with nodes if by none."""
    asked = [name for name in CLUSTERS if name in request.fixturenames]
    return request.getfixturevalue(asked[0] if asked else "cluster")


@pytest.fixture
def kubectl(asked_cluster) -> Kubectl:
    """kubectl with administrator rights, for no namespace in particular."""
    return asked_cluster.kubectl


@pytest.fixture
def namespace(request, kubectl) -> Iterator[str]:
    """A new namespace; its deletion begins after the test and is not waited for."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    name = f"{words}-{uuid.uuid4().hex[:6]}"
    kubectl.make_namespace(name)
    yield name
    kubectl.delete("namespace", name, wait=False)


def pytest_collection_modifyitems(items):
    """Give tests on Kubernetes more time than those without, unless they say how much."""
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """After a failure, while the test's objects are still there, write what is known about its cluster."""
    report = yield
    fixtures = getattr(item, "funcargs", {})
    found = next((fixtures[name] for name in ("asked_cluster", *CLUSTERS) if name in fixtures), None)
    if found and report.failed and report.when != "teardown":
        folder = diagnose(found.kubectl, folder_of(item.name, REPORTS), logs=found.logs())
        report.sections.append(("the cluster after the failure", f"written to {folder}"))
    return report
