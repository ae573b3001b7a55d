"""The certificates of one test cluster: a throw-away authority, servers, users, and their kubeconfig files."""

import base64
import datetime as dt
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = dt.timedelta(days=30)


class Authority:
    """Signs everything of one cluster; its files lie in one folder, NAME.crt and NAME.key."""

    def __init__(self, folder: Path) -> None:
        """Make the authority, or read it from its folder."""
        self.folder = folder
        self._name = _subject("e2e-ca", "")
        if (folder / "ca.key").exists():
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey), "we wrote another kind"
            self._key = key
            return
        folder.mkdir(parents=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._write("ca", self._key, builder.sign(self._key, hashes.SHA256()))

    def issue(
        self,
        name: str,
        *,
        common_name: str,
        organization: str = "",
        names: Sequence[str] = (),
        life: dt.timedelta = LIFE,
    ) -> None:
        """Write NAME.crt and NAME.key, good for serving under `names` (DNS or IP) and as a client.

        A `life` below zero makes one that has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        subject = _subject(common_name, organization)
        builder = _builder(subject, self._name, key, life=life).add_extension(usage, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_name, names))), critical=False)
        self._write(name, key, builder.sign(self._key, hashes.SHA256()))

    def service_account_keys(self) -> None:
        """Write sa.key and sa.pub, with which tokens are signed and checked."""
        key = ec.generate_private_key(ec.SECP256R1())
        self._write_key("sa", key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.folder / "sa.pub").write_bytes(public)

    def kubeconfig(self, path: Path, *, user: str, server: str) -> Path:
        """Write a kubeconfig file for a user whose certificate was issued."""

        def encoded(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": encoded("ca.crt")}
        keys = {"client-certificate-data": encoded(f"{user}.crt"), "client-key-data": encoded(f"{user}.key")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "e2e",
            "clusters": [{"name": "e2e", "cluster": cluster}],
            "users": [{"name": user, "user": keys}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user}}],
        }
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return path

    def _write(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self._write_key(name, key)

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        path = self.folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )


def _subject(common_name: str, organization: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, life: dt.timedelta = LIFE
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    end = now + life
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - dt.timedelta(minutes=5))
        .not_valid_after(end)
    )
