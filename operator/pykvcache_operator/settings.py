"""What the operator is told at its start, checked once."""

import os.path
import socket
import uuid
from dataclasses import dataclass

from pykvcache_contract.errors import ConfigurationError

WATCH_SECONDS = 120.0
"""How long the server keeps a watch open by default."""
GRACE_SECONDS = 15.0
"""How much later than its time a watch may end; one that does not is cut off and opened anew."""
RESYNC_SECONDS = 300.0
WORKERS = 20
WEBHOOK_SERVICE = "pykvcache-webhook"
STALE_WATCHES = 3
"""A watch that told nothing for so many times its length cannot be cured from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of `pykvcache-operator run`."""

    namespace: str
    lease_name: str
    calibration_image: str
    calibration_pull_secrets: tuple[str, ...]
    calibration_priority_class: str
    allowed_host_paths: tuple[str, ...]
    host: str
    port: int
    watch_seconds: float
    resync_seconds: float
    workers: int
    follow_pods: bool
    webhook_configuration: str
    webhook_service: str
    identity: str

    @property
    def silence_seconds(self) -> float:
        """How long a watch may say nothing before it is opened again.

        Longer than the watch itself: bookmarks need not come for a kind of which no object ever changed [etcd 3.4, API
        server 1.36], and the end of a watch is the sign of life then.
        """
        return self.watch_seconds + GRACE_SECONDS

    @property
    def stale_seconds(self) -> float:
        """After how long without news from the API server the process is not healthy."""
        return STALE_WATCHES * self.watch_seconds


def make_settings(
    *,
    namespace: str,
    lease_name: str,
    calibration_image: str,
    calibration_pull_secrets: tuple[str, ...],
    calibration_priority_class: str,
    allowed_host_paths: tuple[str, ...],
    listen: str,
    watch_seconds: float,
    resync_seconds: float,
    workers: int,
    follow_pods: bool = False,
    webhook_configuration: str = "",
    webhook_service: str = WEBHOOK_SERVICE,
) -> Settings:
    """Return checked settings.

    Raises:
        ConfigurationError: an option cannot be used; the message says which.
    """
    host, port = parse_listen(listen)
    for path in allowed_host_paths:
        if not path.startswith("/") or path.startswith("//") or os.path.normpath(path) != path:
            raise ConfigurationError(f"--allowed-host-path {path}: not an absolute path without `..` and `//`")
    return Settings(
        namespace=namespace,
        lease_name=lease_name,
        calibration_image=calibration_image,
        calibration_pull_secrets=calibration_pull_secrets,
        calibration_priority_class=calibration_priority_class,
        allowed_host_paths=allowed_host_paths,
        host=host,
        port=port,
        watch_seconds=watch_seconds,
        resync_seconds=resync_seconds,
        workers=workers,
        follow_pods=follow_pods,
        webhook_configuration=webhook_configuration,
        webhook_service=webhook_service,
        identity=f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
    )


def parse_listen(text: str, *, option: str = "--listen") -> tuple[str, int]:
    """Return host and port of `host:port`, `:port` or `[v6]:port`; no host means every address.

    >>> parse_listen(":9410"), parse_listen("127.0.0.1:0"), parse_listen("[::1]:80")
    (('', 9410), ('127.0.0.1', 0), ('::1', 80))

    Raises:
        ConfigurationError: no such form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{option} {text}: write host:port, or :port for every address")
    return host.removeprefix("[").removesuffix("]"), int(port)
