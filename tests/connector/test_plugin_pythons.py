"""The library in images with another Python: it loads, or says clearly that it does not, and vLLM starts.

The interpreters are those that pyenv or the machine has; one that is missing is skipped.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pykvcache_contract import names

MINORS = range(8, 15)
OURS = {"kv_connector": names.CONNECTOR_CLASS, "kv_role": "kv_both", "kv_connector_extra_config": {"pool": "/cache"}}
OLD_VLLM = {
    "vllm/__init__.py": "__version__ = '0.6.3'",
    "vllm/config.py": """
class KVTransferConfig:
    def __init__(self, kv_connector, kv_role, kv_connector_extra_config):
        self.kv_connector = kv_connector
        self.kv_connector_extra_config = kv_connector_extra_config
""",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    kv_transfer_config = None
    prefix_caching_hash_algo = "builtin"

    def create_engine_config(self, usage_context=None):
        return {"transfer": self.kv_transfer_config, "hash": self.prefix_caching_hash_algo, "context": usage_context}
""",
}
"""An old vLLM as far as the plugin looks: it knows kv-transfer-configs, and none of what our connector uses."""

START = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
import vllm.engine.arg_utils
import pykvcache_connector.plugin as plugin
plugin.register()
print(json.dumps({"config": vllm.engine.arg_utils.EngineArgs().create_engine_config("here"), "argv": sys.argv[1:]}))
"""


@pytest.fixture(params=MINORS, ids=lambda minor: f"3.{minor}")
def python(request):
    """The newest interpreter of a minor version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [*sorted(pyenv.glob(f"versions/3.{request.param}.*/bin/python"), reverse=True)]
    found = candidates[0] if candidates else shutil.which(f"python3.{request.param}")
    if found is None:
        pytest.skip(f"no Python 3.{request.param} here")
    return str(found)


@pytest.fixture(scope="module")
def old_vllm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    for name, text in OLD_VLLM.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def run(python, code, *arguments, paths, **environment):
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment}
    command = [python, "-SB", "-c", code, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)


def test_an_old_vllm_starts_without_the_cache_and_says_why_in_one_line(python, library, old_vllm):
    injected = {names.INJECTED_VARIABLE: "0.2.0", names.TRANSFER_CONFIG_VARIABLE: json.dumps(OURS)}
    done = run(python, START, paths=[library, old_vllm], **injected)
    assert 0 == done.returncode, done.stderr
    expected = {"transfer": None, "hash": "builtin", "context": "here"}
    assert {"config": expected, "argv": []} == json.loads(done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("WARNING py-kvcache is off: this image has vLLM 0.6.3 with Python 3.")
    assert line.endswith("vLLM starts without the cache.")


def test_flags_of_injection_do_not_reach_an_old_vllm(python, library, old_vllm):
    flags = ["--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config", json.dumps(OURS)]
    done = run(python, START, "m", *flags, paths=[library, old_vllm], **{names.INJECTED_VARIABLE: "0.2.0"})
    assert 0 == done.returncode, done.stderr
    assert ["m"] == json.loads(done.stdout)["argv"]
    assert 1 == len(done.stderr.splitlines())


def test_without_injection_nothing_happens(python, library, old_vllm):
    flags = ["--kv-transfer-config", json.dumps(OURS)]
    variables = {names.TRANSFER_CONFIG_VARIABLE: json.dumps(OURS)}
    done = run(python, START, *flags, paths=[library, old_vllm], **variables)
    assert 0 == done.returncode, done.stderr
    assert flags == json.loads(done.stdout)["argv"]
    assert json.loads(done.stdout)["config"]["transfer"] is None
    assert "" == done.stderr


FIND_PLUGIN = """
import importlib.metadata as metadata
points = metadata.entry_points()
group = points.select(group="vllm.general_plugins") if hasattr(points, "select") else points["vllm.general_plugins"]
(point,) = group
print(point.name, point.load())
"""


def test_the_plugin_is_found_on_the_path_alone(python, library):
    done = run(python, FIND_PLUGIN, paths=[library])
    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith(f"{names.VLLM_PLUGIN_NAME} <function register")


LOAD = """
import ctypes, errno, sys
if sys.version_info < (3, 10):
    print("too old")
    raise SystemExit
import compileall, pathlib
for package in ("pykvcache_connector", "pykvcache_contract", "pykvcache_storage"):
    for path in pathlib.Path(sys.argv[1], package).rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
from pykvcache_storage.pool import open_pool
from pykvcache_storage.reactor import liburing
ring, parameters = ctypes.create_string_buffer(liburing.RING_STRUCT_SIZE_BYTES), liburing.Parameters()
answer = liburing.load().queue_init(8, ring, ctypes.byref(parameters))
# A kernel or a seccomp profile may forbid io_uring; the library is called all the same.
print("works" if answer in (0, -errno.EPERM, -errno.ENOSYS, -errno.ENOMEM) else answer)
"""


def test_the_library_is_whole_for_every_python_that_vllm_has(python, library):
    done = run(python, LOAD, str(library), paths=[library])
    assert 0 == done.returncode, done.stderr
    assert done.stdout.strip() in ("works", "too old")
    assert ("too old" == done.stdout.strip()) == ("/3.8" in python or "/3.9" in python)


def test_the_library_holds_nothing_that_only_other_images_need(library):
    parts = {path.name for path in library.iterdir() if not path.name.endswith(".dist-info")}
    assert {"liburing", "pykvcache_connector", "pykvcache_contract", "pykvcache_storage"} == parts
    assert [] == [*library.rglob("*.zig")]
