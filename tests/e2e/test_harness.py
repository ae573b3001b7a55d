"""What of the harness for tests on Kubernetes can be tried without one."""

import hashlib
import json
import re
import ssl
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from harness import binaries, images, oci
from harness.binaries import Binaries
from harness.certificates import Authority
from harness.cluster import LocalCluster
from harness.control_plane import ControlPlane, Endpoint
from harness.diagnose import containers_of, folder_of
from harness.processes import Process, abandoned, free_ports, make_folder, tail
from harness.settings import Mode, Settings, SettingsError
from harness.waiting import NotYetError, wait_for

ROOT = Path(__file__).parents[2]


def test_without_a_word_the_cluster_is_ours():
    settings = Settings.read({"XDG_CACHE_HOME": "/cache"})
    assert settings.mode is Mode.LOCAL
    assert settings.cache == Path("/cache/pykvcache-e2e")


def test_a_registry_and_names_of_images_are_read(tmp_path):
    (tmp_path / "config").touch()
    environment = {
        "PYKVCACHE_E2E": "kubeconfig",
        "KUBECONFIG": f"{tmp_path}/config",
        "PYKVCACHE_E2E_REGISTRY": "example.com/team/",
        "PYKVCACHE_E2E_IMAGES": "sidecar=example.com/s:1, operator=example.com/o:1",
    }
    settings = Settings.read(environment)
    assert settings.registry == "example.com/team"
    assert settings.images == {"sidecar": "example.com/s:1", "operator": "example.com/o:1"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"PYKVCACHE_E2E": "docker"}, "use local, kubeconfig, kind"),
        ({"PYKVCACHE_E2E": "kubeconfig"}, "needs KUBECONFIG=FILE; it is not set"),
        ({"PYKVCACHE_E2E": "kubeconfig", "KUBECONFIG": "/absent"}, "it is /absent"),
        ({"PYKVCACHE_E2E_STATE": "/" + "s" * 40}, "longer than 40 characters"),
        ({"PYKVCACHE_E2E_IMAGES": "sidecar"}, "write TARGET=NAME"),
        ({"PYKVCACHE_E2E_IMAGES": "sidecar="}, "write TARGET=NAME"),
    ],
)
def test_a_setting_that_cannot_be_says_what_to_change(environment, says):
    with pytest.raises(SettingsError, match=re.escape(says)):
        Settings.read(environment)


def test_a_wait_ends_with_the_first_true_answer():
    answers = iter([0, 0, 7])
    assert wait_for("a number", lambda: next(answers), every_s=0) == 7


def test_a_wait_in_vain_says_what_was_missing_last():
    def probe():
        raise NotYetError("only 3 of 4")

    with pytest.raises(TimeoutError, match=r"waited 0 s for all four; last seen: NotYetError: only 3 of 4"):
        wait_for("all four", probe, limit_s=0)


def test_a_wait_does_not_hide_a_mistake_of_the_test():
    with pytest.raises(ZeroDivisionError):
        wait_for("nothing", lambda: 1 // 0)


def test_a_process_that_ends_is_noticed_with_its_last_words(tmp_path):
    process = Process("short", ["sh", "-c", "echo last words; exit 3"], log=tmp_path / "log")

    def ended():
        try:
            process.check()
        except RuntimeError as error:
            return str(error)
        return ""

    message = wait_for("the process to end", ended, limit_s=60, every_s=0.01)
    assert "short ended with status 3" in message
    assert message.endswith("last words")
    process.kill()


def test_a_process_is_killed_with_the_program_that_it_waits_for(tmp_path):
    process = Process("shell", ["sh", "-c", "sleep 600 & echo $!; wait"], log=tmp_path / "log")
    inner = int(wait_for("the shell", lambda: tail(process.log), limit_s=60, every_s=0.01))
    process.kill()
    assert not Path(f"/proc/{process.pid}").exists()
    wait_for("its child to be gone", lambda: not is_running(inner), limit_s=60, every_s=0.01)


def is_running(pid):
    """Whether a process runs; one that nobody waits for any more, for want of a parent, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_folder_is_abandoned_when_the_process_that_made_it_is_gone(tmp_path):
    code = "import sys; from pathlib import Path; from harness.processes import make_folder"
    code += "; make_folder(Path(sys.argv[1]), 'c')"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT / "e2e", check=True)
    own = make_folder(tmp_path, "c")
    left = abandoned(tmp_path, "c")
    assert len(left) == 1
    assert set(tmp_path.iterdir()) == {own, *left}


def test_what_a_killed_run_left_goes_with_the_next_cluster(tmp_path):
    nothing = binaries.Binaries(kubernetes=tmp_path, tools=tmp_path, etcd=tmp_path)
    killed = tmp_path / "c-999999999-x"  # no process has this number
    killed.mkdir()
    (killed / "cluster.json").write_text(json.dumps({"pids": [999_999_999], "sysctls": ""}))
    fresh = LocalCluster.temporary(tmp_path, binaries=nothing, cache=tmp_path)
    assert list(tmp_path.iterdir()) == [fresh.state]


def test_free_ports_differ():
    assert len(set(free_ports(5))) == 5


def test_certificates_are_good_for_their_names_and_the_authority_is_read_again(tmp_path):
    Authority(tmp_path / "pki").issue("server", common_name="server", names=["localhost", "10.0.0.1"])
    Authority(tmp_path / "pki").issue("user", common_name="me", organization="system:masters")
    for name in ("server", "user"):
        command = ["openssl", "verify", "-CAfile", f"{tmp_path}/pki/ca.crt", f"{tmp_path}/pki/{name}.crt"]
        assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.endswith(": OK\n")
    ssl.create_default_context(cafile=f"{tmp_path}/pki/ca.crt").load_cert_chain(
        f"{tmp_path}/pki/server.crt", f"{tmp_path}/pki/server.key"
    )


def test_a_kubeconfig_holds_what_its_user_needs(tmp_path):
    authority = Authority(tmp_path / "pki")
    authority.issue("user", common_name="me")
    path = authority.kubeconfig(tmp_path / "user.conf", user="user", server="https://127.0.0.1:1")
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    assert document["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:1"
    assert set(document["users"][0]["user"]) == {"client-certificate-data", "client-key-data"}


def test_a_folder_becomes_an_image_whose_hashes_are_right(tmp_path):
    (tmp_path / "root" / "bin").mkdir(parents=True)
    (tmp_path / "root" / "bin" / "tool").write_text("#!/bin/sh\n")
    oci.write_archive(tmp_path / "image.tar", name="localhost/x:1", root=tmp_path / "root", command=["/bin/tool"])
    with tarfile.open(tmp_path / "image.tar") as archive:
        blobs = {name: archive.extractfile(name).read() for name in archive.getnames()}
    reference = json.loads(blobs["index.json"])["manifests"][0]
    assert reference["annotations"]["io.containerd.image.name"] == "localhost/x:1"
    manifest = json.loads(blob_of(blobs, reference))
    config = json.loads(blob_of(blobs, manifest["config"]))
    assert config["config"]["Cmd"] == ["/bin/tool"]
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert len(blob_of(blobs, manifest["layers"][0])) == manifest["layers"][0]["size"]


def blob_of(blobs, descriptor):
    """Return what a descriptor points at, after a check of its hash."""
    algorithm, digest = descriptor["digest"].split(":")
    data = blobs[f"blobs/{algorithm}/{digest}"]
    assert hashlib.new(algorithm, data).hexdigest() == digest
    return data


def test_what_is_in_the_cache_is_not_made_again_and_a_failure_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        binaries.make_once(tmp_path / "cache" / "thing", fail)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".thing.lock"]
    made = binaries.make_once(tmp_path / "cache" / "thing", lambda folder: (folder / "whole").touch())
    assert binaries.make_once(tmp_path / "cache" / "thing", fail) == made
    assert (made / "whole").exists()


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(binaries.shutil, "which", lambda program, path: None)
    with pytest.raises(binaries.MissingError, match=r"apt-get install .* etcd-server$"):
        binaries.require("etcd")


def test_the_version_of_kubernetes_is_that_of_its_module():
    assert f"require k8s.io/kubernetes {binaries.VERSION}\n" in (binaries.MODULES / "go.mod").read_text()


def test_ci_installs_the_packages_that_the_harness_needs():
    script = (ROOT / ".ci" / "run").read_text()
    assert {pair for pair in binaries.DEBIAN.items() if f"{pair[0]}:{pair[1]}" not in script} == set()


def test_the_images_are_the_last_stages_of_the_dockerfile():
    stages = re.findall(r"^FROM runtime AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(stages) == sorted(images.TARGETS)


def test_every_package_of_the_wheel_is_in_the_build_context():
    ignored = (ROOT / ".dockerignore").read_text()
    packages = re.search(r"wheel\]\npackages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    names = re.findall(r'"(.+?)"', packages)
    assert len(names) > 5
    assert [name for name in names if f"!{name}\n" not in ignored] == []


def test_an_unknown_image_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no image vllm; there are operator, sidecar"):
        images.build("vllm", tmp_path)


def test_the_folder_of_a_diagnosis_is_a_plain_name(tmp_path):
    folder = folder_of("test_x[a && b/c]", tmp_path)
    assert folder == tmp_path / "test_x-a-b-c"


def test_a_diagnosis_counts_init_containers_too():
    status = {"initContainerStatuses": [{"name": "first"}], "containerStatuses": [{"name": "second"}]}
    assert [state["name"] for state in containers_of({"status": status})] == ["first", "second"]
    assert containers_of({}) == []


@pytest.mark.slow
def test_the_program_for_developers_explains_itself():
    command = [sys.executable, "-m", "harness"]
    done = subprocess.run(command, cwd=ROOT / "e2e", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "up [NODES]" in done.stdout


def test_a_controller_manager_that_waited_too_long_is_started_again_a_few_times(tmp_path):
    """On a busy machine the API server takes longer than it waits."""
    started = []

    def spawn(name, command):
        started.append(name)
        return Process(name, ["false" if name == "kcm" else "cat"], log=tmp_path / name)

    programs = Binaries(kubernetes=tmp_path, etcd=tmp_path / "etcd", tools=tmp_path)
    endpoint = Endpoint(address="127.0.0.1", api_port=1, etcd_port=2, etcd_peer_port=3)
    plane = ControlPlane(tmp_path / "state", binaries=programs, endpoint=endpoint, spawn=spawn, has_nodes=False)
    plane._start_controller_manager()
    with pytest.raises(RuntimeError, match="kcm ended with status 1"):
        wait_for("it to be given up", plane.check, limit_s=60, every_s=0.01)
    assert started == ["kcm"] * 6
