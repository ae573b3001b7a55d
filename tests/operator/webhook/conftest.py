"""Folders with certificates, as the kubelet shows them, and clients that check them."""

import asyncio
import ssl
from contextlib import suppress

import pytest

from harness.certificates import LIFE, Authority

NAME = "webhook.test"


class Secret:
    """A folder with tls.crt and tls.key behind the link `..data`, and the authority that signs them."""

    def __init__(self, path) -> None:
        self.authority = Authority(path / "pki")
        self.folder = path / "secret"
        self.folder.mkdir()
        self._count = 0

    def issue(self, *, life=LIFE):
        """Make a pair, show it, and return its serial number as clients see it."""
        name = self.make(life=life)
        self.show(certificate=self.read(f"{name}.crt"), key=self.read(f"{name}.key"))
        return self.serial_of(name)

    def make(self, *, life=LIFE):
        """Make a pair and return its name."""
        self._count += 1
        name = f"pair{self._count}"
        self.authority.issue(name, common_name=NAME, names=[NAME, "127.0.0.1"], life=life)
        return name

    def read(self, file):
        return (self.authority.folder / file).read_bytes()

    def show(self, *, certificate, key):
        """Show these files from now on, all at once."""
        generation = self.folder / f"..{self._count}"
        generation.mkdir(exist_ok=True)
        for name, content in (("tls.crt", certificate), ("tls.key", key)):
            if content is not None:
                (generation / name).write_bytes(content)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        link = self.folder / "..data_tmp"
        link.symlink_to(generation.name)
        link.replace(self.folder / "..data")

    def serial_of(self, name):
        found = ssl._ssl._test_decode_cert(str(self.authority.folder / f"{name}.crt"))
        return found["serialNumber"]

    def client(self):
        """Return the TLS settings of a client that trusts this authority only."""
        return ssl.create_default_context(cafile=str(self.authority.folder / "ca.crt"))


@pytest.fixture
def secret(tmp_path):
    return Secret(tmp_path)


@pytest.fixture
def with_listener():
    """Runs `test(port)` beside a server that sends every line back, with these TLS settings."""

    def run(tls, test):
        async def echo(reader, writer):
            with suppress(ConnectionError):
                while line := await reader.readline():
                    writer.write(line)
            writer.close()

        async def main():
            server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=tls)
            try:
                await asyncio.wait_for(test(server.sockets[0].getsockname()[1]), 60)
            finally:
                server.close()

        asyncio.run(main())

    return run
