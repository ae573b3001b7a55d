"""The webhook's metrics, as declared in the contract. Event loop's thread only."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykvcache_contract.metrics import (
    CERTIFICATE_EXPIRY,
    CERTIFICATE_RELOADS,
    RELOAD_RESULTS,
    WEBHOOK_DURATION,
    WEBHOOK_POOLS,
    WEBHOOK_REQUESTS,
    WEBHOOK_WATCH_EVENT,
    Metric,
)
from pykvcache_operator.exporter import Collected
from pykvcache_operator.webhook.certificate_files import CertificateFiles
from pykvcache_operator.webhook.known import Known


class Metrics:
    """Everything on /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = _counter(WEBHOOK_REQUESTS, self.registry)
        self._reloads = _counter(CERTIFICATE_RELOADS, self.registry)
        self._duration = Histogram(
            WEBHOOK_DURATION.name, WEBHOOK_DURATION.help, buckets=WEBHOOK_DURATION.buckets, registry=self.registry
        )

    def count(self, *, result: str, reason: str, seconds: float) -> None:
        """Count one review that was answered after so many seconds."""
        self._requests.labels(result, reason).inc()
        self._duration.observe(seconds)

    def count_certificate(self, is_taken: bool) -> None:
        """Count a certificate that was found."""
        self._reloads.labels(RELOAD_RESULTS[0] if is_taken else RELOAD_RESULTS[1]).inc()

    def watch(self, *, known: Known, certificate: CertificateFiles) -> None:
        """Serve what these two tell when somebody asks."""

        def samples() -> Iterator[tuple[Metric, tuple[str, ...], float]]:
            yield WEBHOOK_POOLS, ("true",), float(len(known.pools))
            yield WEBHOOK_POOLS, ("false",), float(len(known.unreadable))
            for name, unix_time in known.heard(time.time()):
                yield WEBHOOK_WATCH_EVENT, (name,), unix_time
            if certificate.expiry_seconds is not None:
                yield CERTIFICATE_EXPIRY, (), certificate.expiry_seconds

        self.registry.register(Collected(samples))


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    counter = Counter(metric.name, metric.help, metric.labels, registry=registry)
    for labels in metric.initial_labels:
        counter.labels(*labels)
    return counter
