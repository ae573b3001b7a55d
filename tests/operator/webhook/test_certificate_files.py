"""A certificate in files is taken into use, replaced and waited for, without dropping a connection."""

import asyncio
import datetime as dt
import ssl
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from pykvcache_operator.webhook.certificate_files import CertificateFiles


class Taken(list):
    """What was counted."""


def files_of(secret, *, clock=time.time, taken=None):
    return CertificateFiles(secret.folder, clock=clock, counted=(taken if taken is not None else Taken()).append)


async def connect(port, client, *, name="webhook.test"):
    """Return an open connection, and the serial number of the certificate that it was shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
    return reader, writer, writer.get_extra_info("peercert")["serialNumber"]


async def say(reader, writer, text):
    writer.write(text)
    return await reader.readline()


async def close(*writers):
    for writer in writers:
        writer.close()
        await writer.wait_closed()


def test_a_new_pair_holds_for_new_connections_and_open_ones_go_on(secret, with_listener):
    first = secret.issue()
    files = files_of(secret)
    files.look()

    async def test(port):
        reader, old, shown = await connect(port, secret.client())
        assert shown == first
        second = secret.issue()
        files.look()
        _, new, shown = await connect(port, secret.client())
        assert shown == second != first
        assert await say(reader, old, b"still here\n") == b"still here\n"
        await close(old, new)

    with_listener(files.listener, test)


def test_a_client_that_names_no_server_gets_it_too(secret, with_listener):
    serial = secret.issue()
    files = files_of(secret)
    files.look()

    async def test(port):
        _, writer, shown = await connect(port, secret.client(), name="127.0.0.1")  # no name is sent for an address
        assert shown == serial
        await close(writer)

    with_listener(files.listener, test)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_of_tls_are_served(secret, with_listener, version):
    serial = secret.issue()
    files = files_of(secret)
    files.look()
    client = secret.client()
    client.minimum_version = client.maximum_version = version

    async def test(port):
        _, writer, shown = await connect(port, client)
        assert shown == serial
        await close(writer)

    with_listener(files.listener, test)


def test_older_versions_of_tls_are_not(secret, with_listener):
    secret.issue()
    files = files_of(secret)
    files.look()
    client = secret.client()
    client.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1

    async def test(port):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connect(port, client)

    with_listener(files.listener, test)


def rsa_pair(serial):
    """Return certificate and key of another type than the authority's."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "webhook.test")])
    now = dt.datetime.now(dt.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), serial, now, now + dt.timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form, lock = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return certificate, key.private_bytes(serialization.Encoding.PEM, form, lock), key


@pytest.mark.slow
def test_of_a_pair_of_another_key_type_nothing_of_the_old_one_is_left(secret, with_listener):
    """In one context both would be there, and clients that prefer the old type would see it until it has expired."""
    secret.issue()
    files = files_of(secret)
    files.look()
    certificate, key, _ = rsa_pair(77)
    secret.show(certificate=certificate, key=key)
    files.look()
    client = ssl.create_default_context(cadata=certificate.decode())

    async def test(port):
        _, writer, shown = await connect(port, client)
        assert int(shown, 16) == 77
        await close(writer)

    with_listener(files.listener, test)


def test_files_that_come_later_are_waited_for(secret, with_listener, caplog):
    files = files_of(secret)
    files.look()
    files.look()
    assert caplog.text.count("waiting for") == 1
    assert "tls.crt: the operator or cert-manager makes it" in files.problem

    async def test(port):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connect(port, secret.client())
        serial = secret.issue()
        files.look()
        assert files.problem == ""
        _, writer, shown = await connect(port, secret.client())
        assert shown == serial
        await close(writer)

    with_listener(files.listener, test)


def locked_key():
    certificate, _, key = rsa_pair(78)
    lock = serialization.BestAvailableEncryption(b"secret")
    return certificate, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def wrong_pair(secret, case):
    """Return a pair that cannot be used."""
    one, other = secret.make(), secret.make()
    certificate, key = secret.read(f"{one}.crt"), secret.read(f"{one}.key")
    return {
        "of two pairs": lambda: (certificate, secret.read(f"{other}.key")),
        "half written": lambda: (certificate[: len(certificate) // 2], key),
        "empty": lambda: (b"", b""),
        "without a key": lambda: (certificate, None),
        "no text": lambda: (b"\x00\xff" * 100, key),
        "with a locked key": locked_key,
    }[case]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["of two pairs", "half written", "empty", "without a key", "no text", "with a locked key"]
)
def test_a_pair_that_cannot_be_used_leaves_the_old_one_in_use(secret, with_listener, caplog, case):
    serial = secret.issue()
    taken = Taken()
    files = files_of(secret, taken=taken)
    files.look()
    certificate, key = wrong_pair(secret, case)
    secret.show(certificate=certificate, key=key)
    files.look()
    files.look()
    assert files.problem == "", "what is in use is good"
    assert taken == [True] + [False] * (case != "without a key"), "it is counted once"
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1

    async def test(port):
        _, writer, shown = await connect(port, secret.client())
        assert shown == serial
        await close(writer)
        better = secret.issue()
        files.look()
        _, writer, shown = await connect(port, secret.client())
        assert shown == better
        await close(writer)

    with_listener(files.listener, test)


def test_one_that_expires_while_nothing_better_comes_is_told(secret):
    now = [time.time()]
    secret.issue(life=dt.timedelta(hours=1))
    files = files_of(secret, clock=lambda: now[0])
    files.look()
    now[0] = files.expiry_seconds - 1
    assert files.problem == ""
    now[0] += 1
    assert "has expired" in files.problem
    secret.issue(life=dt.timedelta(hours=2))
    files.look()
    assert files.problem == ""


def test_unchanged_files_are_not_read_again(secret):
    secret.issue()
    taken = Taken()
    files = files_of(secret, taken=taken)
    for _ in range(3):
        files.look()
    assert taken == [True]


def test_a_swap_while_it_is_read_is_seen_the_next_time(secret, monkeypatch):
    secret.issue()
    taken = Taken()
    files = files_of(secret, taken=taken)
    load = files._load

    def swapped():
        loaded = load()
        secret.issue()
        return loaded

    monkeypatch.setattr(files, "_load", swapped)
    files.look()
    assert (taken, files.expiry_seconds) == ([], None)
    monkeypatch.undo()
    files.look()
    assert taken == [True]
