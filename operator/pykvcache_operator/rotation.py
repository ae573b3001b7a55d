"""When the webhook's certificates are made anew, so that every API server can verify every replica at any time. Pure.

Facts: an API server verifies the webhook with the caBundle that it read last, and several API servers read it moments
apart. A replica of the webhook serves what its kubelet put into the mounted Secret, up to two minutes late. The
operator may die between any two writes, and two operators may write for a moment. People delete, damage and replace
Secrets, and clocks are set. What they mean: at any moment several certificates may be served, and each must be verified
by every bundle that an API server may hold. Therefore

- one authority signs. Its Secret lists the earlier ones too, without their keys, as long as something that they signed
  may be served; the bundle is all of them;
- writes have one order: the authorities, then the bundle in the webhook's configuration, then the certificate. A new
  authority signs only after the bundle has held it for `SETTLE_SECONDS`, and the earlier ones leave a day after that.
  Only where what is served is of no use anyway, nothing is waited for;
- an authority that is lost leaves its certificate in the serving Secret and in the configuration: what is found there
  stays trusted until the next certificate is served;
- certificates begin `BACKDATE` before they are made, so that clocks may be set, and differ by two days.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509

from pykvcache_operator.certificates import (
    BUNDLE,
    CERTIFICATE,
    KEY,
    PREVIOUS,
    Authority,
    Data,
    dns_names,
    is_due,
    is_issued,
    is_pair,
    is_valid,
    key_to_pem,
    made_at,
    make_authority,
    make_serving,
    read_authority,
    read_certificates,
    read_key,
    to_pem,
    trustable,
)

SETTLE_SECONDS = 600.0
"""For so long the configuration names an authority before anything it signed is served: API servers read a change
within a second, one that lost its watch within minutes."""
KEEP = timedelta(days=1)
"""How long earlier authorities stay after the certificate last changed; kubelets refresh Secrets within minutes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the cluster holds.

    Args:
        authority, serving: data of the two Secrets; empty if there is none.
        trusted: the configuration's caBundle; None if there is no configuration, so that nobody calls the webhook.
    """

    authority: Data
    serving: Data
    trusted: bytes | None


@dataclass(frozen=True, slots=True)
class Ages:
    """How long something has been so, in seconds of a clock that never jumps; 0 for what was not seen.

    Args:
        trusted: of the authority with this certificate in the configuration's bundle.
        served: of this certificate in the serving Secret.
    """

    trusted: Callable[[x509.Certificate], float]
    served: Callable[[x509.Certificate], float]


def decide_authority(seen: Seen, *, name: str, now: datetime, ages: Ages) -> Authority:
    """Return the authority that there should be: the one seen, unless it is of no use, or two thirds of its life over.

    Args:
        name: the DNS name under which API servers call the webhook.
    """
    authority = read_authority(seen.authority, now)
    if authority is None:
        found = _certificates(seen.authority.get(CERTIFICATE), seen.authority.get(PREVIOUS), *_elsewhere(seen))
        return make_authority(now, previous=found)
    if is_due(authority.certificate, now):
        return make_authority(now, previous=authority.trusted)
    serving = _read_serving(seen.serving, name=name, now=now)
    if serving is None:
        return authority
    if is_issued(serving, by=authority.certificate):
        is_settled = now - made_at(serving) >= KEEP and ages.served(serving) >= SETTLE_SECONDS
        previous = () if is_settled else authority.previous
    else:
        issuers = [found for found in _certificates(*_elsewhere(seen)) if is_issued(serving, by=found)]
        previous = (*authority.previous, *issuers)
    return Authority(authority.certificate, authority.key, trustable(previous, now, beside=authority.certificate))


def decide_serving(seen: Seen, authority: Authority, *, name: str, now: datetime, ages: Ages) -> Data:
    """Return what the serving Secret should hold; what is there while that will do, or the authority is too new."""
    bundle = to_pem(authority.trusted)
    serving = _read_serving(seen.serving, name=name, now=now)
    if serving is None or not any(is_issued(serving, by=issuer) for issuer in authority.trusted):
        return {**make_serving(authority, name=name, now=now), BUNDLE: bundle}
    is_wanted = is_due(serving, now) or not is_issued(serving, by=authority.certificate)
    may_sign = seen.trusted is None or ages.trusted(authority.certificate) >= SETTLE_SECONDS
    if is_wanted and may_sign:
        return {**make_serving(authority, name=name, now=now), BUNDLE: bundle}
    return {**seen.serving, BUNDLE: bundle}


def expiries(authority: Authority, serving: Data) -> dict[str, datetime]:
    """Return when each of the contract's `WEBHOOK_CERTIFICATES` ends, of those that are there."""
    ends = {"authority": authority.certificate.not_valid_after_utc}
    if served := read_certificates(serving.get(CERTIFICATE)):
        ends["serving"] = served[0].not_valid_after_utc
    return ends


def authority_data(authority: Authority, *, seen: Data, now: datetime) -> Data:
    """Return what the authority's Secret should hold; what is there, as it is written there, where it says the same."""
    former = read_authority(seen, now)
    if former is None or former.certificate != authority.certificate:
        return {
            CERTIFICATE: to_pem([authority.certificate]),
            KEY: key_to_pem(authority.key),
            PREVIOUS: to_pem(authority.previous),
        }
    return seen if former.previous == authority.previous else {**seen, PREVIOUS: to_pem(authority.previous)}


def _read_serving(data: Data, *, name: str, now: datetime) -> x509.Certificate | None:
    """Return the certificate of a Secret's data; None if it serves nobody now, whoever issued it."""
    found = read_certificates(data.get(CERTIFICATE))
    key = read_key(data.get(KEY))
    if not found or key is None or not is_pair(found[0], key) or not is_valid(found[0], now):
        return None
    return found[0] if name in dns_names(found[0]) else None


def _elsewhere(seen: Seen) -> tuple[bytes | None, bytes | None]:
    """Return where certificates of a lost authority may be found."""
    return seen.serving.get(BUNDLE), seen.trusted


def _certificates(*texts: bytes | None) -> tuple[x509.Certificate, ...]:
    return tuple(certificate for text in texts for certificate in read_certificates(text))
