"""X.509 for the webhook: an authority and what it signs, made, read and judged; when, says `rotation`.

Pure: the time is an argument. Nothing here raises for what it is given: what cannot be read is not there.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE = timedelta(days=365)
SERVING_LIFE = timedelta(days=90)
"""Shorter than what an authority has left when it is followed by the next, a third of its life."""
BACKDATE = timedelta(days=3)
"""One made by a clock that is a day ahead is still good for one that is a day behind."""
PREVIOUS_MAX = 4
"""Earlier authorities that are kept, the newest; more appear only when people put them there."""

CERTIFICATE, KEY, BUNDLE, PREVIOUS = "tls.crt", "tls.key", "ca.crt", "previous.crt"
"""Keys of the Secrets' data: the first three as in every Secret of type kubernetes.io/tls."""

Data = Mapping[str, bytes]
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
"""Ours are of the first kind; people bring the second, too."""
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)


@dataclass(frozen=True, slots=True)
class Authority:
    """What signs, and the certificates of what signed before."""

    certificate: x509.Certificate
    key: Key
    previous: tuple[x509.Certificate, ...] = ()

    @property
    def trusted(self) -> tuple[x509.Certificate, ...]:
        """All that verifies what may be served."""
        return (self.certificate, *self.previous)


# ---- making ----


def make_authority(now: datetime, *, previous: Iterable[x509.Certificate] = ()) -> Authority:
    """Return a new authority; of the earlier ones given, those that can still verify something."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Each has a name of its own: verifiers look for an issuer by its name first.
    subject = _subject(f"py-kvcache webhook authority {serial:040x}"[:60])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=subject, public_key=key.public_key())
        .serial_number(serial)
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key, trustable(previous, now, beside=certificate))


def make_serving(authority: Authority, *, name: str, now: datetime) -> dict[str, bytes]:
    """Return a new certificate for this DNS name and its key, as a Secret's data."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    certificate = (
        x509.CertificateBuilder(issuer_name=issuer.subject, public_key=key.public_key())
        .subject_name(_subject("py-kvcache webhook"))  # a common name has at most 64 letters, a Service's name more
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(min(now + SERVING_LIFE, issuer.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_issuer_identifier(issuer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return {CERTIFICATE: to_pem([certificate]), KEY: key_to_pem(key)}


def to_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """Return certificates as text, in this order."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def key_to_pem(key: Key) -> bytes:
    """Return a key as text that everybody can read: it is kept in a Secret."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _issuer_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Return how a certificate names its issuer's key; verifiers compare it with what the issuer says of itself."""
    try:
        own = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        key: Any = issuer.public_key()  # of any kind that may sign, also in a Secret that people filled
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


# ---- reading ----


def read_authority(data: Data, now: datetime) -> Authority | None:
    """Return the authority of a Secret's data; None if it cannot sign now: it is missing, damaged, expired or none."""
    found = read_certificates(data.get(CERTIFICATE))
    key = read_key(data.get(KEY))
    if not found or key is None or not is_pair(found[0], key) or not may_sign(found[0], now):
        return None
    previous = trustable(read_certificates(data.get(PREVIOUS)), now, beside=found[0])
    return Authority(found[0], key, previous)


def read_certificates(pem: bytes | None) -> tuple[x509.Certificate, ...]:
    """Return the certificates in a text, without those that cannot be read."""
    found = []
    for block in _PEM.findall(pem or b""):
        try:
            certificate = x509.load_pem_x509_certificate(block)
            certificate.public_key()
            certificate.extensions  # noqa: B018 - parsed only now, and what cannot be parsed is of no use
        except _UNREADABLE:
            continue
        found.append(certificate)
    return tuple(found)


def read_key(pem: bytes | None) -> Key | None:
    """Return a private key; None if it cannot be read, is encrypted or of another kind than ours."""
    try:
        key = serialization.load_pem_private_key(pem or b"", password=None)
    except _UNREADABLE:
        return None
    return key if isinstance(key, Key) else None


def trustable(
    certificates: Iterable[x509.Certificate], now: datetime, *, beside: x509.Certificate
) -> tuple[x509.Certificate, ...]:
    """Return the authorities among certificates that are valid, each once, the newest first."""
    usable = dict.fromkeys(each for each in certificates if each != beside and may_sign(each, now))
    return tuple(sorted(usable, key=lambda each: each.not_valid_before_utc, reverse=True)[:PREVIOUS_MAX])


# ---- judging ----


def may_sign(certificate: x509.Certificate, now: datetime) -> bool:
    """Return whether this is the certificate of an authority, and valid."""
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
    try:
        is_authority &= certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except x509.ExtensionNotFound:
        pass  # then it may be used for everything
    return is_authority and is_valid(certificate, now)


def is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    """Return whether the time lies between its begin and its end."""
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def made_at(certificate: x509.Certificate) -> datetime:
    """Return when a certificate of ours was made."""
    return certificate.not_valid_before_utc + BACKDATE


def is_due(certificate: x509.Certificate, now: datetime) -> bool:
    """Return whether two thirds of its life are over."""
    made = made_at(certificate)
    return now >= made + (certificate.not_valid_after_utc - made) * 2 / 3


def is_issued(certificate: x509.Certificate, *, by: x509.Certificate) -> bool:
    """Return whether this authority signed it."""
    try:
        certificate.verify_directly_issued_by(by)
    except (InvalidSignature, *_UNREADABLE):
        return False
    return True


def is_pair(certificate: x509.Certificate, key: Key) -> bool:
    """Return whether the key is the certificate's."""
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return certificate.public_key().public_bytes(*form) == key.public_key().public_bytes(*form)


def dns_names(certificate: x509.Certificate) -> list[str]:
    """Return the names under which it may be served."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)
