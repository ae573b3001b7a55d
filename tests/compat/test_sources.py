"""Releases are read from a real index on this machine, by ranges where the server allows it and whole where not."""

import io
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from compat import sources
from compat.sources import Installed, SourceError, Wheel

WHEEL = "vllm-9.9.9-cp38-abi3-manylinux_2_28_x86_64.whl"
MODULE = "vllm/v1/request.py"


def make_wheel() -> bytes:
    """Return a wheel of 3 MB, so that reading one module by ranges is visibly less than all of it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/kernels.so", bytes(3 << 20))
        archive.writestr(MODULE, "class Request: ...\n")
        archive.writestr("vllm-9.9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
        archive.writestr("vllm-9.9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_x86_64\n")
        archive.writestr("vllm-9.9.9.dist-info/RECORD", "")
    return buffer.getvalue()


class Index(ThreadingHTTPServer):
    """A package index with one wheel."""

    allows_ranges = True
    speaks_json = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = make_wheel()
        self.sent_bytes = 0
        self.requests = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.requests.append(self.path)
        if self.path == "/simple/vllm/":
            self.send_index()
        elif self.path == f"/files/{WHEEL}":
            self.send_wheel()
        else:
            self.send_error(404)

    def send_index(self):
        if self.server.speaks_json and "json" in self.headers["Accept"]:
            files = [{"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": {}}]
            meta = {"api-version": "1.0"}
            self.answer(json.dumps({"meta": meta, "name": "vllm", "files": files}), sources.JSON_INDEX)
        else:
            self.answer(f'<a href="../../files/{WHEEL}">{WHEEL}</a>', "text/html")

    def send_wheel(self):
        wheel, wanted = self.server.wheel, self.headers["Range"]
        if not (wanted and self.server.allows_ranges):
            self.answer(wheel, "application/zip")
            return
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        last = min(last, len(wheel) - 1)
        self.answer(wheel[first : last + 1], "application/zip", 206, f"bytes {first}-{last}/{len(wheel)}")

    def answer(self, content, kind, status=200, content_range=None):
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        try:
            self.wfile.write(content)
            self.server.sent_bytes += len(content)
        except ConnectionError:
            pass  # the reader saw that the answer is no range and hung up


@pytest.fixture
def index(monkeypatch):
    server = Index()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    sources.pip_option.cache_clear()
    yield server
    sources.pip_option.cache_clear()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("speaks_json", [True, False], ids=["json", "html"])
def test_a_module_is_read_without_the_rest_of_the_wheel(index, tmp_path, speaks_json):
    index.speaks_json = speaks_json
    wheel = Wheel("9.9.9", tmp_path)
    assert wheel.read(MODULE) == "class Request: ...\n"
    assert wheel.read("vllm/gone.py") is None
    assert index.sent_bytes < len(index.wheel) / 2


@pytest.mark.slow
def test_a_second_run_needs_no_network(index, tmp_path):
    Wheel("9.9.9", tmp_path).read(MODULE)
    index.requests.clear()
    assert Wheel("9.9.9", tmp_path).read(MODULE) == "class Request: ...\n"
    assert index.requests == []


@pytest.mark.slow
def test_a_server_without_ranges_is_asked_for_the_whole_wheel(index, tmp_path):
    index.allows_ranges = False
    assert Wheel("9.9.9", tmp_path).read(MODULE) == "class Request: ...\n"


@pytest.mark.slow
def test_an_unknown_version_and_a_dead_index_are_errors(index, tmp_path, monkeypatch):
    with pytest.raises(SourceError, match="no x86-64 wheel of vllm 9"):
        Wheel("9.9.8", tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    sources.pip_option.cache_clear()
    with pytest.raises(SourceError, match="cannot read"):
        Wheel("9.9.9", tmp_path)


@pytest.mark.parametrize("name", ["vllm-1.2.3.dist-info", "vllm-1.2.3+cpu.dist-info"])
def test_an_installed_release_tells_its_version(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("x = 1\n")
    installed = Installed(tmp_path)
    assert installed.version == "1.2.3"
    assert installed.read("vllm/__init__.py") == "x = 1\n"


def test_an_environment_without_vllm_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="no vLLM"):
        Installed(tmp_path)
