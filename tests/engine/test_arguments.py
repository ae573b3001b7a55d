"""What injection adds to a command line, as vLLM's own parser reads it. No engine starts."""

import json
import subprocess
import sys

import pytest

from pykvcache_operator.injection.commands import read
from pykvcache_operator.injection.transfer_config import TransferOptions, find, ours
from pykvcache_operator.injection.vllm_container import configure

OPTIONS = TransferOptions(staging_bytes=2**30, block_tokens=256, create_pool=False)
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
ABSENT = [[], ["--kv-cache-dtype", "fp8"], ["--kv-offloading-backend", "native"], ["--port", "80"]]
PRESENT = [
    ["--kv-transfer-config", NIXL],
    [f"--kv_transfer_config={NIXL}"],
    ["--kv-transfer-conf", NIXL],
    [f"--kv-t={NIXL}"],
    ["--kv_transfer-config.kv_connector", "NixlConnector", "--kv-transfer-config.kv_role=kv_both"],
    ["--kv-offloading-size", "8"],
]
PARSER = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
parser.add_argument("--port")
read = []
for arguments in json.load(sys.stdin):
    found = parser.parse_args(arguments)
    config = found.kv_transfer_config
    fields = "kv_connector kv_connector_module_path kv_role kv_load_failure_policy kv_connector_extra_config"
    told = config and {name: getattr(config, name) for name in fields.split()}
    read.append([told, found.prefix_caching_hash_algo, found.kv_offloading_size])
json.dump(read, sys.stdout)
"""


def injected(arguments, on_conflict="Skip"):
    container = {"name": "c", "command": ["vllm", "serve"], "args": ["--model", "m", *arguments]}
    annotations = {"pykvcache.io/on-conflict": on_conflict}
    return configure(container, options=OPTIONS, annotations=annotations, version="1").container["args"]


@pytest.fixture(scope="module")
def parse():
    """Call vLLM's parser on several command lines in one process: importing vLLM takes seconds."""

    def call(*lines):
        result = subprocess.run(
            [sys.executable, "-c", PARSER], input=json.dumps(lines), capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr[-2000:]
        return json.loads(result.stdout.splitlines()[-1])

    return call


def test_vllm_takes_a_configuration_exactly_where_injection_finds_one(parse):
    lines = [*ABSENT, *PRESENT]
    found = [find(read({"command": ["vllm", "serve", *line]}), {}) is not None for line in lines]
    assert found == [False] * len(ABSENT) + [True] * len(PRESENT)
    assert found == [bool(told or offloading) for told, _, offloading in parse(*lines)]


def test_vllm_reads_what_injection_adds(parse):
    plain, own_hash, merged = parse(
        injected(["--port", "80"]),
        injected(["--prefix_caching_hash_algo=sha256"]),
        injected(["--kv-transfer-conf", NIXL], "Merge"),
    )
    assert plain[:2] == [ours(OPTIONS), "sha256_cbor"]
    assert own_hash[:2] == [ours(OPTIONS), "sha256"]
    assert merged[0]["kv_connector_extra_config"]["connectors"] == [json.loads(NIXL), ours(OPTIONS)]
    assert (merged[0]["kv_connector"], merged[0]["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
