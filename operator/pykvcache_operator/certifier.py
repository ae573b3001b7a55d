"""Keeps the webhook's certificates, as `rotation` decides: two Secrets, and the caBundle of its configuration.

Looks every `LOOK_SECONDS` with three reads and writes only what differs, so that whatever people delete, damage or wipe
is healed by then. Every write is meant for the version that was read: of two operators one is refused and looks again.
The configuration is read first and written before the certificate. So an operator that was frozen in between cannot
put back a bundle from before somebody else's change.

A failure is logged once and counted, and tried again; it never ends the operator. Event loop's thread only.
"""

import asyncio
import base64
import logging
from collections.abc import Callable, Iterable
from datetime import datetime

from cryptography import x509

from pykvcache_operator import paths
from pykvcache_operator.certificates import CERTIFICATE, Authority, Data, read_certificates, to_pem
from pykvcache_operator.client import Api, ApiError, Document
from pykvcache_operator.rotation import (
    Ages,
    Seen,
    authority_data,
    decide_authority,
    decide_serving,
    expiries,
)

logger = logging.getLogger(__name__)

AUTHORITY_SECRET = "pykvcache-webhook-ca"
SERVING_SECRET = "pykvcache-webhook-tls"
"""In the operator's namespace; webhook pods mount the second one."""
WEBHOOK = "pods.pykvcache.io"
"""The one webhook of the configuration that is ours."""
LABELS = {"app.kubernetes.io/name": "py-kvcache", "app.kubernetes.io/component": "webhook"}
LOOK_SECONDS = 30.0
RETRY_SECONDS = 5.0
"""After a failure."""


class Certifier:
    """Keeps the certificates of one installation.

    Args:
        configuration: name of the MutatingWebhookConfiguration.
        service: name of the Service, in the same namespace as the Secrets, that API servers call.
        clock: the time, which may jump; aware of its zone.
        monotonic: seconds that never jump.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        configuration: str,
        service: str,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self._api, self._namespace, self._configuration = api, namespace, configuration
        self._name = f"{service}.{namespace}.svc"
        self._clock = clock
        self._trusted, self._served = _Since(monotonic), _Since(monotonic)
        self._ages = Ages(trusted=self._trusted.age, served=self._served.age)
        self._complaint = ""
        self.failures = 0
        """Looks that failed since the start."""
        self.expiries: dict[str, datetime] = {}
        """When each of the contract's `WEBHOOK_CERTIFICATES` ends; empty before the first look."""

    async def run(self) -> None:
        """Look for ever."""
        while True:
            has_looked = await self.try_look()
            await asyncio.sleep(LOOK_SECONDS if has_looked else RETRY_SECONDS)

    async def try_look(self) -> bool:
        """Look once; return False if that must be done again soon: somebody else wrote, or it failed."""
        try:
            await self.look()
        except ApiError as error:
            if error.is_conflict:
                logger.info("somebody else writes the webhook's certificates, looking again: %s", error)
            else:
                self._fail(f"{error}{_hint(error)}", None)
        except Exception as error:  # the top of a loop that must not end: the operator has more to do
            self._fail(repr(error), error)
        else:
            return True
        return False

    async def look(self) -> None:
        """Make the certificates what they should be now.

        Raises:
            ApiError: the API server refused or did not answer; what was written until then is whole.
        """
        configuration = await self._find(paths.webhook_configuration(self._configuration))
        authority_secret = await self._find(paths.secret(self._namespace, AUTHORITY_SECRET))
        serving_secret = await self._find(paths.secret(self._namespace, SERVING_SECRET))
        entry = self._entry(configuration)
        seen = Seen(_data(authority_secret), _data(serving_secret), None if entry is None else entry[1])
        self._served.note(read_certificates(seen.serving.get(CERTIFICATE))[:1])
        now = self._clock()
        authority = decide_authority(seen, name=self._name, now=now, ages=self._ages)
        wanted = authority_data(authority, seen=seen.authority, now=now)
        await self._write(AUTHORITY_SECRET, authority_secret, wanted, kind="Opaque")
        await self._trust(configuration, entry, authority)
        serving = decide_serving(seen, authority, name=self._name, now=now, ages=self._ages)
        await self._write(SERVING_SECRET, serving_secret, serving, kind="kubernetes.io/tls")
        self._served.note(read_certificates(serving.get(CERTIFICATE))[:1])
        self.expiries = expiries(authority, serving)
        if entry is not None:
            self._complaint = ""

    async def _trust(
        self, configuration: Document | None, entry: "tuple[int, bytes] | None", authority: Authority
    ) -> None:
        """See that the configuration's bundle is the authority's, and note since when."""
        if configuration is None or entry is None:
            self._trusted.note(())
            self._complain(
                f"nobody calls the webhook: there is no MutatingWebhookConfiguration {self._configuration} with a "
                f"webhook {WEBHOOK}; certificates are kept all the same"
            )
            return
        index, former = entry
        bundle = to_pem(authority.trusted)
        if former != bundle:
            path = f"/webhooks/{index}"
            version = configuration["metadata"]["resourceVersion"]
            steps = [
                {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
                {"op": "test", "path": f"{path}/name", "value": WEBHOOK},
                {"op": "add", "path": f"{path}/clientConfig/caBundle", "value": _encoded(bundle)},
            ]
            await self._api.edit(paths.webhook_configuration(self._configuration), steps)
            logger.info(
                "the webhook's configuration %s trusts %d authorities", self._configuration, len(authority.trusted)
            )
            self._trusted.note(each for each in read_certificates(former) if each in authority.trusted)
        self._trusted.note(authority.trusted)

    async def _write(self, name: str, secret: Document | None, data: Data, *, kind: str) -> None:
        """Make a Secret hold this data; what else is in it stays."""
        changes = {key: _encoded(value) for key, value in data.items() if _data(secret).get(key) != value}
        if not changes:
            return
        metadata: Document = {"name": name, "namespace": self._namespace, "labels": LABELS}
        body: Document = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": changes}
        if secret is None:
            await self._api.create(paths.secret(self._namespace), {**body, "type": kind})
        else:
            metadata["resourceVersion"] = secret["metadata"]["resourceVersion"]
            await self._api.merge(paths.secret(self._namespace, name), body)
        logger.info("wrote the Secret %s/%s", self._namespace, name)

    async def _find(self, path: str) -> Document | None:
        try:
            return await self._api.get(path)
        except ApiError as error:
            if error.is_missing:
                return None
            raise

    def _entry(self, configuration: Document | None) -> "tuple[int, bytes] | None":
        """Return where our webhook stands in the configuration, and its caBundle."""
        for index, webhook in enumerate((configuration or {}).get("webhooks") or []):
            if webhook["name"] == WEBHOOK:
                return index, base64.b64decode(webhook["clientConfig"].get("caBundle") or "")
        return None

    def _fail(self, text: str, error: Exception | None) -> None:
        self.failures += 1
        self._complain(f"the webhook's certificates could not be looked after, trying again: {text}", error)

    def _complain(self, text: str, error: Exception | None = None) -> None:
        """Say what is wrong, once until something else is or all is well."""
        if text != self._complaint:
            logger.warning("%s", text, exc_info=error)
        self._complaint = text


class _Since:
    """Since when certificates have been seen without a break."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since: dict[x509.Certificate, float] = {}

    def note(self, certificates: Iterable[x509.Certificate]) -> None:
        """These are there now, and no others."""
        now = self._monotonic()
        self._since = {each: self._since.get(each, now) for each in certificates}

    def age(self, certificate: x509.Certificate) -> float:
        """Return for how many seconds it has been there."""
        return self._monotonic() - self._since.get(certificate, self._monotonic())


def _data(secret: Document | None) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in ((secret or {}).get("data") or {}).items()}


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _hint(error: ApiError) -> str:
    """Return what people can do about a refusal."""
    if error.is_forbidden:
        return (
            ". The operator's roles must allow to get, create and patch its Secrets, to get and patch the configuration"
        )
    return ". Delete that Secret: it is made anew" if error.status == 422 and "immutable" in str(error) else ""
