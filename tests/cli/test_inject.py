"""`pykvcache inject`: the webhook's change, made to manifests of all forms, and nothing else changed."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pykvcache_cli.kubectl import PROGRAM
from pykvcache_cli.main import app
from pykvcache_cli.manifests import parse_manifest, plain

ROOT = Path(__file__).parents[2]
POOL = ROOT / "examples" / "nodelocal.yaml"
SHAPES = sorted((ROOT / "tests" / "operator" / "injection" / "shapes").glob("*.yaml"))
DEPLOYMENT = """\
# our model
apiVersion: apps/v1
kind: Deployment
metadata:
  name: llama  # keep
spec:
  template:
    metadata:
      labels: {app: llama%s}
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.22.1
        args:
        - --model   # which
        - tiny
---
kind: Service
apiVersion: v1
metadata: {name: llama}
"""
LABELLED = DEPLOYMENT % ", pykvcache.io/pool: default"
UNLABELLED = DEPLOYMENT % ""


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="vllm.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def test_a_labelled_deployment_gets_the_cache_and_keeps_its_comments(run, write):
    result = run("inject", "-f", write(LABELLED), "--pool-file", POOL)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.startswith("# our model\n")
    assert "  name: llama  # keep\n" in text
    assert "        - --model   # which\n        - tiny\n        - --prefix-caching-hash-algo\n" in text
    assert text.endswith("---\nkind: Service\napiVersion: v1\nmetadata: {name: llama}\n")
    assert "Deployment/llama spec.template: cache added" in result.stderr
    pod = plain(parse_manifest(text, source="out").documents[0])["spec"]["template"]
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["pykvcache-library", "pykvcache-pool"]


def test_doing_it_twice_changes_nothing_more(run, write):
    once = run("inject", "-f", write(LABELLED), "--pool-file", POOL).stdout
    again = run("inject", "-f", write(once), "--pool-file", POOL)
    assert (again.exit_code, again.stdout) == (0, once)
    assert "has the cache already" in again.stderr
    assert "To renew it" not in again.stderr


def test_what_another_version_did_is_renewed_when_its_annotation_is_taken_away(run, write):
    once = run("inject", "-f", write(LABELLED), "--pool-file", POOL).stdout
    older = re.sub(r"(pykvcache.io/injected: ).*", r"\g<1>0.1.0", once).replace("connector:", "connector:old-")
    told = run("inject", "-f", write(older), "--pool-file", POOL)
    assert "by version 0.1.0" in told.stderr
    assert told.stdout == older
    bare = re.sub(r" *pykvcache.io/injected: .*\n", "", older)
    renewed = run("inject", "-f", write(bare), "--pool-file", POOL)
    assert renewed.exit_code == 0, renewed.output
    assert next(yaml.safe_load_all(renewed.stdout)) == next(yaml.safe_load_all(once))


@pytest.mark.parametrize("containers", ["{name: a, image: nginx}, {name: b, image: nginx}", "{name: a, image: redis}"])
def test_pool_sets_the_label_on_what_runs_vllm_and_leaves_all_else(run, write, containers):
    other = f"kind: Pod\nmetadata: {{name: web}}\nspec:\n  containers: [{containers}]\n"
    result = run(
        "inject", "-f", write(UNLABELLED), "-f", write(other, "b.yaml"), "--pool", "default", "--pool-file", POOL
    )
    assert result.exit_code == 0, result.output
    assert "pykvcache.io/pool: default" in result.stdout
    assert result.stdout.endswith("---\n" + other)
    assert "Pod/web" not in result.stderr


def test_a_diff_shows_only_what_changes(run, write):
    result = run("inject", "-f", write(LABELLED), "--pool-file", POOL, "--diff")
    removed = [line for line in result.stdout.splitlines() if line.startswith("-") and not line.startswith("---")]
    added = [line for line in result.stdout.splitlines() if line.startswith("+")]
    assert removed == []
    assert any("--kv-transfer-config" in line for line in added)


def test_standard_input_lists_and_json_work(write):
    items = [plain(document) for document in parse_manifest(LABELLED, source="x").documents]
    text = json.dumps({"kind": "List", "apiVersion": "v1", "items": items}, indent=4)
    result = CliRunner().invoke(app, ["inject", "-f", "-", "--pool-file", str(POOL)], input=text)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith('{\n    "kind": "List"')
    pod = json.loads(result.stdout)["items"][0]["spec"]["template"]
    assert pod["metadata"]["annotations"]["pykvcache.io/injected"]


def test_the_pool_may_be_among_the_manifests(run, write):
    result = run("inject", "-f", write(LABELLED + "---\n" + POOL.read_text()))
    assert result.exit_code == 0, result.output
    assert "cache added" in result.stderr


@pytest.mark.parametrize("shape", SHAPES, ids=lambda path: path.stem)
def test_pods_of_every_platform_are_changed_or_told_why_not(run, write, shape):
    pool = write(POOL.read_text().replace("name: default", "name: fast"), "pool.yaml")
    result = run("inject", "-f", shape, "--pool-file", pool)
    before = [plain(document) for document in parse_manifest(shape.read_text(), source="x").documents]
    after = [plain(document) for document in parse_manifest(result.stdout, source="y").documents]
    if "cache added" in result.stderr:
        assert after != before
    else:
        assert after == before
        assert result.exit_code == 1
        assert "no cache" in result.stderr


def test_a_template_that_must_go_without_stays_as_it_is_and_the_exit_status_says_so(run, write):
    text = LABELLED.replace("- tiny\n", "- tiny\n        - --kv-transfer-config={}\n")
    result = run("inject", "-f", write(text), "--pool-file", POOL)
    assert (result.exit_code, result.stdout) == (1, text)
    assert "no cache" in result.stderr


def test_an_unknown_pool_is_an_error_that_says_how_to_make_it_known(run, write):
    result = run("inject", "-f", write(LABELLED))
    assert result.exit_code == 2
    assert "--pool-file" in result.stderr
    assert "kubectl get kvcachepool default" in result.stderr


def test_nothing_labelled_is_told(run, write):
    result = run("inject", "-f", write(UNLABELLED), "--pool-file", POOL)
    assert (result.exit_code, result.stdout) == (0, UNLABELLED)
    assert "nothing to do" in result.stderr


@pytest.mark.parametrize(("name", "text"), [("missing.yaml", None), ("bad.yaml", "a: [1"), ("binary", "\udcff")])
def test_a_file_that_cannot_be_read_is_named(run, tmp_path, name, text):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    result = run("inject", "-f", path)
    assert result.exit_code == 2
    assert name in result.stderr


def test_a_pool_that_is_not_valid_is_named_with_its_field(run, write):
    result = run(
        "inject",
        "-f",
        write(LABELLED),
        "--pool-file",
        write("kind: KVCachePool\nmetadata: {name: default}\nspec: {storage: {type: Tape}}\n", "p.yaml"),
    )
    assert result.exit_code == 2
    assert "storage.type" in result.stderr


def test_as_a_plugin_of_kubectl_it_asks_the_cluster_for_the_pool(write, tmp_path, monkeypatch):
    pool = json.dumps(plain(parse_manifest(POOL.read_text(), source="x").documents[0]))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"#!/bin/sh\n[ \"$*\" = 'get --output=json kvcachepools.pykvcache.io -- default' ] && echo '{pool}'\n"
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = CliRunner().invoke(app, ["inject", "-f", str(write(LABELLED))], prog_name=PROGRAM)
    assert result.exit_code == 0, result.output
    assert "cache added" in result.stderr


@pytest.mark.parametrize(("given", "is_warned"), [("", True), ("      imagePullSecrets: [{name: mine}]\n", False)])
def test_a_pod_that_would_lose_the_pull_secrets_of_its_service_account_is_warned_of(run, write, given, is_warned):
    text = LABELLED.replace("      containers:", f"{given}      containers:")
    result = run("inject", "-f", write(text), "--pool-file", POOL, "--pull-secret", "ours")
    assert "name: ours" in result.stdout
    assert ("service account" in result.stderr) is is_warned


def test_a_label_in_a_manifest_is_never_an_option_of_kubectl(write, tmp_path, monkeypatch):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked; exit 1\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    text = LABELLED.replace("pykvcache.io/pool: default", "pykvcache.io/pool: --server=https://elsewhere.example")
    assert CliRunner().invoke(app, ["inject", "-f", str(write(text))], prog_name=PROGRAM).exit_code == 2
    assert (tmp_path / "asked").read_text().splitlines()[-2:] == ["--", "--server=https://elsewhere.example"]


def test_what_kubectl_says_is_passed_on(write, tmp_path, monkeypatch):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho 'retrying' >&2; echo 'Error from server (NotFound): no default' >&2; exit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = CliRunner().invoke(app, ["inject", "-f", str(write(LABELLED))], prog_name=PROGRAM)
    assert result.exit_code == 2
    assert "NotFound" in result.stderr
    assert "retrying" not in result.stderr
