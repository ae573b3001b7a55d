"""The certificate of the webhook's server: read from files, and read again when somebody changes them.

Facts: the kubelet shows a Secret as a folder of links through `..data`, which it swaps when the Secret changes, and may
start the pod before there is a Secret. A pair of another key type put into a context that has one already leaves both
in it, and the client's taste decides which is used. A failed `load_cert_chain` may leave a certificate without its key.

Therefore each pair gets a context of its own, taken into use once it is known to be whole. The listener has one context
for all its life, without a certificate; while a client says hello it is told which one to go on with. So a new pair
holds for new connections, and those that are open go on. A pair that is half there or does not fit is left alone, with
one line in the log; what was in use stays.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

logger = logging.getLogger(__name__)

CERTIFICATE_FILE, KEY_FILE = "tls.crt", "tls.key"
LOOK_SECONDS = 5.0
"""How often the files are looked at. The kubelet takes up to a minute or two to show a change."""
Signature = tuple[tuple[int, int, int], ...]
"""Inode, time and size of each file: other files have another one."""


class CertificateFiles:
    """The pair in a folder.

    Args:
        clock: Unix time.
        counted: told of each pair that was found, whether it was taken into use.
    """

    def __init__(
        self, folder: Path, *, clock: Callable[[], float], counted: Callable[[bool], None] = lambda _taken: None
    ) -> None:
        self._folder, self._clock, self._counted = folder, clock, counted
        self._current: ssl.SSLContext | None = None
        self._seen: Signature | None = None
        self._said = ""
        self.expiry_seconds: float | None = None
        """When the certificate in use ends, Unix time; None while there is none."""
        self.listener = _context()
        """For the listening socket; a handshake fails while there is no certificate."""
        self.listener.sni_callback = self._choose

    @property
    def problem(self) -> str:
        """Why clients will not accept the server now; "" if they will, as far as can be told from here."""
        if self.expiry_seconds is None:
            return self._said or f"no certificate was read from {self._folder} yet"
        if self.expiry_seconds <= self._clock():
            return f"the certificate in {self._folder} has expired; {self._said or 'waiting for another one'}"
        return ""

    async def keep(self) -> None:
        """Look at the files again and again until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Take what is in the files into use, if it is another pair than last time and whole."""
        try:
            found = self._signature()
            if found == self._seen:
                return
            context, expiry = self._load()
            if found != self._signature():
                return  # swapped while it was read; next time
        except FileNotFoundError as error:
            self._say(f"waiting for {error.filename}: the operator or cert-manager makes it")
            return
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self._refuse(f"the certificate in {self._folder} cannot be used: {error}")
            return
        self._current, self.expiry_seconds, self._seen, self._said = context, expiry, found, ""
        self._counted(True)
        logger.info("took the certificate in %s into use; it ends in %.1f h", self._folder, self._hours_left())

    def _load(self) -> tuple[ssl.SSLContext, float]:
        certificate, key = self._folder / CERTIFICATE_FILE, self._folder / KEY_FILE
        context = _context()
        context.load_cert_chain(certificate, key, password="")  # else a locked key asks on the terminal
        parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
        return context, parsed.not_valid_after_utc.timestamp()

    def _signature(self) -> Signature:
        stats = [(self._folder / name).stat() for name in (CERTIFICATE_FILE, KEY_FILE)]
        return tuple((found.st_ino, found.st_mtime_ns, found.st_size) for found in stats)

    def _refuse(self, text: str) -> None:
        if text != self._said:
            self._counted(False)
        self._say(text)

    def _say(self, text: str) -> None:
        if text != self._said:
            logger.warning("%s", text)
        self._said = text

    def _hours_left(self) -> float:
        return ((self.expiry_seconds or 0.0) - self._clock()) / 3600

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _listener: ssl.SSLContext) -> int | None:
        """Go on with the pair in use; called for clients that name no server, too."""
        if self._current is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._current
        return None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
