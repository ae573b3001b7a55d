"""Where the source text of a vLLM release comes from: an installed copy, or a few members of a wheel on an index.

A CUDA wheel has 300 MB and the checker needs fifty files of it, so the wheel is opened over HTTP with range requests
and only the wanted members travel (about 2 MB). Read members are kept in a cache folder; nothing is executed.
"""

import base64
import functools
import html.parser
import http.client
import io
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path, PurePosixPath
from typing import Protocol

TIMEOUT_SECONDS = 60.0
RANGE_SIZE_BYTES = 1 << 18
"""One request brings this much; the directory of a vLLM wheel has about 500 KB."""

JSON_INDEX = "application/vnd.pypi.simple.v1+json"


class SourceError(Exception):
    """A release cannot be read: no network, no such version, no suitable wheel."""


class RangesRefused(SourceError):
    """The server sends whole files only."""


class Source(Protocol):
    """The Python files of one release."""

    version: str

    def read(self, path: str) -> str | None:
        """Return the text of a file, named from the folder that holds `vllm`, or None if there is none."""
        ...


class Installed:
    """A copy of vLLM in an environment of this machine."""

    def __init__(self, site_packages: Path) -> None:
        self._root = site_packages
        found = [match for path in site_packages.iterdir() if (match := re.match(r"vllm-([\d.]+)", path.name))]
        if not found:
            raise SourceError(f"no vLLM is installed in {site_packages}")
        self.version = found[0][1].rstrip(".")

    def read(self, path: str) -> str | None:
        file = self._root / path
        return file.read_text() if file.is_file() else None


class Wheel:
    """A release on a package index, read member by member.

    Args:
        cache: folder that keeps what was read, so that a second run needs no network.
    """

    def __init__(self, version: str, cache: Path) -> None:
        self.version = version
        self._cache = cache / f"vllm-{version}"
        self._archive: zipfile.ZipFile | None = None
        listing = self._cache / "members.txt"
        if not listing.exists():
            members = self._open().namelist()
            self._cache.mkdir(parents=True, exist_ok=True)
            listing.write_text("\n".join(members))
        self._members = set(listing.read_text().splitlines())

    def read(self, path: str) -> str | None:
        if path not in self._members:
            return None
        cached = self._cache / PurePosixPath(path)
        if not cached.exists():
            text = self._open().read(path).decode()
            cached.parent.mkdir(parents=True, exist_ok=True)
            cached.write_text(text)
        return cached.read_text()

    def _open(self) -> zipfile.ZipFile:
        if self._archive is None:
            try:
                self._archive = zipfile.ZipFile(RangeFile(find_wheel("vllm", self.version)))
            except RangesRefused:
                self._archive = zipfile.ZipFile(download_wheel("vllm", self.version, self._cache))
        return self._archive


class RangeFile(io.RawIOBase):
    """A file on a web server that is fetched in ranges as it is read."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = 0
        self._ranges: dict[int, bytes] = {}
        with fetch(url, {"Range": "bytes=0-0"}) as response:
            if response.status != 206:
                raise RangesRefused(f"{urllib.parse.urlsplit(url).hostname} ignores range requests")
            self._size = int(response.headers["Content-Range"].rpartition("/")[2])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._position + size, self._size)
        parts = []
        while self._position < end:
            index, start = divmod(self._position, RANGE_SIZE_BYTES)
            part = self._range(index)[start : start + end - self._position]
            parts.append(part)
            self._position += len(part)
        return b"".join(parts)

    def _range(self, index: int) -> bytes:
        if index not in self._ranges:
            first = index * RANGE_SIZE_BYTES
            last = min(first + RANGE_SIZE_BYTES, self._size) - 1
            with fetch(self._url, {"Range": f"bytes={first}-{last}"}) as response:
                content = response.read()
            if len(content) != last - first + 1:
                raise SourceError(f"short answer for bytes {first}-{last} of {self._url}")
            self._ranges[index] = content
        return self._ranges[index]


@functools.cache
def pip_option(name: str) -> str | None:
    """Return an option as pip would use it: environment first, then its configuration files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    options = dict(re.findall(r"(?m)^(\S+?)='(.*)'$", listing))
    return os.environ.get(f"PIP_{name.upper().replace('-', '_')}") or options.get(f"global.{name}")


def fetch(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Open a URL with pip's certificates; user and password in the URL become a header."""
    parts = urllib.parse.urlsplit(url)
    if parts.username:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers = {**headers, "Authorization": "Basic " + base64.b64encode(secret.encode()).decode()}
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    context = ssl.create_default_context(cafile=pip_option("cert"))
    request = urllib.request.Request(urllib.parse.urlunsplit(parts), headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context)
        assert isinstance(response, http.client.HTTPResponse)
        return response
    except OSError as error:
        raise SourceError(f"cannot read {parts.hostname}{parts.path}: {error}") from error


class _Links(html.parser.HTMLParser):
    """Collects (file name, URL) of an index page in HTML."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.files: list[tuple[str, str]] = []
        self._base = base

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (target := dict(attrs).get("href")):
            url = urllib.parse.urljoin(self._base, target.partition("#")[0])
            self.files.append((PurePosixPath(urllib.parse.urlsplit(url).path).name, url))


def find_wheel(project: str, version: str) -> str:
    """Return the URL of the x86-64 wheel of one version on pip's index."""
    index = (pip_option("index-url") or "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{project}/"
    with fetch(page, {"Accept": f"{JSON_INDEX}, text/html;q=0.5"}) as response:
        content, kind = response.read().decode(), response.headers.get_content_type()
    files: list[tuple[str, str]]
    if kind == JSON_INDEX:
        files = [(file["filename"], urllib.parse.urljoin(page, file["url"])) for file in json.loads(content)["files"]]
    else:
        links = _Links(page)
        links.feed(content)
        files = links.files
    for name, url in files:
        if name.startswith(f"{project}-{version}-") and name.endswith("x86_64.whl"):
            return url
    raise SourceError(f"{urllib.parse.urlsplit(page).hostname} has no x86-64 wheel of {project} {version}")


def download_wheel(project: str, version: str, folder: Path) -> Path:
    """Fetch a whole wheel with pip, for indexes that refuse ranges."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 24, 17)]
    target = [*platforms, "--python-version=3.11", "--implementation=cp", "--abi=abi3", "--dest", str(folder)]
    result = subprocess.run([*command, *target, f"{project}=={version}"], check=False)
    wheels = sorted(folder.glob(f"{project}-{version}-*.whl"))
    if result.returncode or not wheels:
        raise SourceError(f"pip cannot download {project} {version}")
    return wheels[0]
