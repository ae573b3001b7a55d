"""X.509 as the webhook needs it: what is made verifies, and what is damaged is seen to be."""

import ssl
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from pykvcache_operator.certificates import (
    BACKDATE,
    CERTIFICATE,
    KEY,
    PREVIOUS,
    PREVIOUS_MAX,
    dns_names,
    is_due,
    is_issued,
    key_to_pem,
    make_authority,
    make_serving,
    read_authority,
    read_certificates,
    to_pem,
)

NAME = "pykvcache-webhook.pykvcache-system.svc"
NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)


def data_of(authority):
    return {CERTIFICATE: to_pem([authority.certificate]), KEY: key_to_pem(authority.key)}


def own_authority(key, *, now=NOW, days=3650, ca=True):
    """Return the data of an authority as a person would make it: not backdated, without identifiers."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "corporate")])
    builder = x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
    builder = builder.serial_number(7).not_valid_before(now).not_valid_after(now + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {CERTIFICATE: to_pem([builder.sign(key, digest)]), KEY: key.private_bytes(*form)}


def handshake(bundle, serving, folder):
    """Do a TLS handshake in memory, the client strict about chains and names."""
    (folder / "pair.pem").write_bytes(serving[CERTIFICATE] + serving[KEY])
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "pair.pem")
    client_context = ssl.create_default_context(cadata=bundle.decode())
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=NAME)
    waiting = [client, server]
    while waiting:
        side = waiting.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(side)


def test_what_an_authority_signs_is_verified_with_any_bundle_that_holds_it(tmp_path):
    now = datetime.now(timezone.utc)
    former, authority = make_authority(now), make_authority(now)
    serving = make_serving(authority, name=NAME, now=now)
    handshake(to_pem([authority.certificate]), serving, tmp_path)
    handshake(to_pem([former.certificate, authority.certificate]), serving, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(to_pem([former.certificate]), serving, tmp_path)


def test_a_certificate_serves_one_name_and_does_not_outlive_its_authority():
    authority = make_authority(NOW)
    serving = read_certificates(make_serving(authority, name=NAME, now=NOW + timedelta(days=360))[CERTIFICATE])[0]
    assert dns_names(serving) == [NAME]
    assert serving.not_valid_after_utc == authority.certificate.not_valid_after_utc


def test_a_certificate_is_due_when_two_thirds_of_its_life_are_over():
    serving = read_certificates(make_serving(make_authority(NOW), name=NAME, now=NOW)[CERTIFICATE])[0]
    assert serving.not_valid_before_utc == NOW - BACKDATE
    assert not is_due(serving, NOW + timedelta(days=60, seconds=-1))
    assert is_due(serving, NOW + timedelta(days=60))


def test_an_authority_is_read_back_with_its_predecessors():
    former = make_authority(NOW)
    authority = make_authority(NOW, previous=former.trusted)
    read = read_authority({**data_of(authority), PREVIOUS: to_pem(authority.previous)}, NOW)
    assert read.trusted == (authority.certificate, former.certificate)


@pytest.mark.parametrize(
    "key", [ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(public_exponent=65537, key_size=2048)]
)
def test_an_authority_that_a_person_brings_signs(tmp_path, key):
    now = datetime.now(timezone.utc)
    authority = read_authority(own_authority(key, now=now), now)
    serving = make_serving(authority, name=NAME, now=now)
    assert is_issued(read_certificates(serving[CERTIFICATE])[0], by=authority.certificate)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({CERTIFICATE: b"", KEY: b""}, "empty"),
        ({CERTIFICATE: b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"}, "no certificate"),
        ({CERTIFICATE: b"\xff\xfe"}, "no text"),
        ({KEY: b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"}, "no key"),
        ({KEY: key_to_pem(ec.generate_private_key(ec.SECP256R1()))}, "another key"),
        (own_authority(ed25519.Ed25519PrivateKey.generate()), "a kind of key that we do not sign with"),
        (own_authority(ec.generate_private_key(ec.SECP256R1()), ca=False), "no authority"),
        (own_authority(ec.generate_private_key(ec.SECP256R1()), now=NOW + timedelta(hours=1)), "not yet valid"),
        (own_authority(ec.generate_private_key(ec.SECP256R1()), now=NOW - timedelta(days=2), days=1), "expired"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_authority_that_cannot_sign_is_none(damage, what):
    assert read_authority({**data_of(make_authority(NOW)), **damage}, NOW) is None


def test_an_encrypted_key_is_of_no_use():
    authority = make_authority(NOW)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    key = authority.key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret"))
    assert read_authority({**data_of(authority), KEY: key}, NOW) is None


def test_a_damaged_certificate_in_a_bundle_spoils_no_other():
    first, second = make_authority(NOW), make_authority(NOW)
    text = to_pem([first.certificate])
    damaged = text.replace(text[60:64], b"????")
    assert read_certificates(damaged + b"noise" + to_pem([second.certificate])) == (second.certificate,)


def test_predecessors_are_authorities_that_are_valid_and_not_many():
    serving = read_certificates(make_serving(make_authority(NOW), name=NAME, now=NOW)[CERTIFICATE])
    expired = make_authority(NOW - timedelta(days=366)).trusted
    former = [make_authority(NOW - timedelta(days=days)).certificate for days in range(PREVIOUS_MAX + 3)]
    authority = make_authority(NOW, previous=[*serving, *expired, *reversed(former), former[0]])
    assert authority.previous == tuple(former[:PREVIOUS_MAX])
