"""What a container starts: arguments are added only where they surely reach vLLM's own parser."""

import os
import shutil
import subprocess
import sys

import pytest

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection import commands, images
from pykvcache_operator.injection.outcome import Skip

SERVER = "vllm/vllm-openai:v0.32.0"


def read(command=None, args=None, image="registry.example/app:1"):
    return commands.read({"name": "c", "image": image, "command": command, "args": args})


@pytest.mark.parametrize(
    ("command", "args", "arguments"),
    [
        (["vllm", "serve", "m", "--port", "80"], None, ("m", "--port", "80")),
        (["vllm", "serve"], ["m"], ("m",)),
        (["vllm"], ["serve", "m"], ("m",)),
        (["/opt/venv/bin/vllm", "serve"], [], ()),
        (["vllm", "run-batch", "-i", "a"], None, ("-i", "a")),
        (["python3", "-m", "vllm.entrypoints.openai.api_server"], ["--model", "m"], ("--model", "m")),
        (["/usr/bin/python3.12", "-u", "-O", "-m", "vllm.entrypoints.openai.api_server"], None, ()),
        (["python", "-um", "vllm.entrypoints.cli.main", "serve", "m"], None, ("m",)),
        (["python", "-X", "dev", "-Wignore", "-mvllm.entrypoints.openai.run_batch", "-i", "a"], None, ("-i", "a")),
        (["python", "/usr/local/bin/vllm", "serve", "m"], None, ("m",)),
        (["tini", "-g", "--", "vllm", "serve", "m"], None, ("m",)),
        (["/usr/bin/tini", "--"], ["vllm", "serve", "m"], ("m",)),
        (["dumb-init", "python3", "-m", "vllm.entrypoints.openai.api_server", "--port=1"], None, ("--port=1",)),
        (["env", "FOO=1", "SHELL=/bin/bash", "vllm", "serve", "m"], None, ("m",)),
        (["numactl", "--cpunodebind", "0", "env", "A=b", "vllm", "serve", "m"], None, ("m",)),
        (["nsys", "profile", "-o", "vllm", "-t", "cuda", "vllm", "serve", "m"], None, ("m",)),
        (["uv", "run", "--with", "vllm", "vllm", "serve", "m"], None, ("m",)),
        (None, ["vllm", "serve", "m"], ("m",)),
        (None, ["python3", "-m", "vllm.entrypoints.openai.api_server", "--port=1"], ("--port=1",)),
    ],
)
def test_the_exec_form_of_vllm_takes_arguments(command, args, arguments):
    found = read(command, args)
    assert (found.arguments, found.runs_vllm, found.cut_off) == (arguments, True, "")


@pytest.mark.parametrize(
    ("image", "args", "arguments"),
    [
        (SERVER, ["--model", "m"], ("--model", "m")),
        (SERVER, ["Qwen/Qwen3-8B", "--port", "80"], ("Qwen/Qwen3-8B", "--port", "80")),
        ("registry:5000/mirror/vllm-openai-rocm@sha256:ab", ["serve", "m"], ("m",)),
        ("public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.11.0", ["--model=m"], ("--model=m",)),
        (
            "quay.io/modh/vllm:rhoai-2.25",
            ["--model=/mnt/models", "--port=8080"],
            ("--model=/mnt/models", "--port=8080"),
        ),
    ],
)
def test_arguments_alone_continue_the_entry_point_of_vllms_image(image, args, arguments):
    found = read(None, args, image)
    assert (found.arguments, found.runs_vllm) == (arguments, True)


@pytest.mark.parametrize(
    ("image", "args"),
    [
        ("rocm/vllm:latest", ["./run.sh", "m"]),
        ("vllm/vllm-router:1", ["--port", "80"]),
        ("ghcr.io/acme/my-vllm:1", ["--model", "m"]),
        ("kserve/huggingfaceserver:v0.16", ["--model_name=m", "--backend=vllm"]),
        (SERVER, ["bench", "serve"]),
        ("ollama/ollama:1", ["serve"]),
    ],
)
def test_arguments_alone_of_another_image_are_left_as_they_are(image, args):
    assert read(None, args, image).arguments is None


@pytest.mark.parametrize(
    ("command", "args", "obstacle"),
    [
        (["sh", "-c", "vllm serve m"], None, "a shell"),
        (["/bin/bash", "-lc"], ["vllm serve m"], "a shell"),
        (["bash", "-o", "pipefail", "-e", "-c", "exec vllm serve m"], None, "a shell"),
        (["tini", "--", "dash", "-xec", "vllm serve m"], None, "a shell"),
        (["env", "A=1", "ash", "-c", "vllm serve m"], None, "a shell"),
        (["bash", "-c", 'exec "$@"', "--", "vllm", "serve", "m"], None, "a shell"),
        (["env", "-S", "vllm serve m"], None, "a wrapper"),
        (["bash", "run.sh"], None, "a shell"),
        (["/start.sh"], ["vllm", "serve"], "start.sh"),
        (["torchrun", "--nproc-per-node=2", "serve.py"], None, "torchrun"),
        (["python3", "/app/batch.py"], None, "a script"),
        (["python3", "-c", "import vllm"], None, "python3 -c"),
        (["python3"], None, "without a script"),
        (["python3", "-m", "debugpy", "-m", "vllm.entrypoints.openai.api_server"], None, "the module debugpy"),
        (["vllm", "bench", "throughput"], None, "vllm bench"),
        (["vllm", "chat"], None, "vllm chat"),
        (["vllm"], None, "vllm,"),
        (["vllm", "serve", "m", "--", "x"], None, "`--`"),
        (["vllm", "serve", "m", "--config", "/etc/vllm.yaml"], None, "--config"),
        (["vllm", "serve", "m"], ["--config=/etc/vllm.yaml"], "--config"),
        (["vllm", "serve", "m", "--omni"], None, "--omni"),
        (None, None, "neither command nor args"),
        ([], [], "neither command nor args"),
    ],
)
def test_everything_else_takes_none_and_says_why(command, args, obstacle):
    found = read(command, args)
    assert found.arguments is None
    assert obstacle in found.obstacle


@pytest.mark.parametrize("text", ["exec vllm serve m", "cd /x; python3 -m vllm.entrypoints.openai.api_server --port 1"])
def test_a_text_that_starts_vllm_is_a_sign_of_it(text):
    assert read(["sh", "-c", text]).runs_vllm
    assert not read(["sh", "-c", text.replace("vllm", "sglang")]).runs_vllm


@pytest.mark.parametrize(
    "text", ["exec myvllm serve m", "curl http://vllm/metrics", "from vllmx import LLM", "vllm-serve"]
)
def test_a_text_that_only_has_the_letters_is_none(text):
    assert not read(["sh", "-c", text]).runs_vllm


@pytest.mark.parametrize("code", ["import vllm", "from vllm import LLM", "import os; from vllm.engine import x"])
def test_python_code_that_imports_vllm_is_a_sign_of_it(code):
    assert read(["python3", "-c", code]).runs_vllm


def test_a_shell_really_ignores_what_follows_its_text():
    program = f"{sys.executable} -c 'import sys; print(len(sys.argv))'"
    result = subprocess.run(["sh", "-c", program, "--kv-transfer-config", "{}"], capture_output=True, check=True)
    assert result.stdout == b"1\n"


def test_a_command_without_end_is_skipped():
    assert read(["vllm", "serve"], ["a"] * 10_000).runs_vllm
    with pytest.raises(Skip, match="args has 10001 entries"):
        read(["vllm", "serve"], ["a"] * 10_001)


@pytest.mark.parametrize("option", ["-I", "-E", "-uE", "-Bs", "-S", "-P", "-u", "-OO"])
def test_options_that_keep_our_library_from_python_are_those_that_really_do(option, tmp_path):
    (tmp_path / "a_library.py").touch()
    script = tmp_path / "script" / "try.py"
    script.parent.mkdir()
    script.write_text("import a_library")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, option, script], env=environment, capture_output=True, check=False)
    found = read(["python3", option, "-m", "vllm.entrypoints.openai.api_server"])
    assert bool(found.cut_off) == (result.returncode != 0), result.stderr
    assert found.runs_vllm


@pytest.mark.parametrize(
    ("options", "cut_off"),
    [
        (["-i"], "env -i"),
        (["-"], "env -"),
        (["-0i"], "env -0i"),
        (["--ignore-environment"], "env --ignore-environment"),
        (["PYTHONPATH=/app"], "env PYTHONPATH=…"),
        (["-u", "PYTHONPATH"], "env -u PYTHONPATH"),
        (["-uVLLM_PLUGINS"], "env -u VLLM_PLUGINS"),
        (["--unset=PYTHONPATH"], "env -u PYTHONPATH"),
        (["--unset", "PYTHONPATH"], "env -u PYTHONPATH"),
        (["-u", "HOME"], ""),
        (["A=-i"], ""),
    ],
)
def test_env_that_takes_our_variables_away_is_seen(options, cut_off):
    assert read(["env", *options, "vllm", "serve", "m"]).cut_off == cut_off
    assert read(["nice", "env", *options, "python3", "-m", "vllm.entrypoints.api_server"]).cut_off == cut_off


@pytest.mark.parametrize(
    "wrapper",
    [
        *(["env", "A=b"], ["nice", "-n", "1"], ["nohup"], ["setsid", "-w"], ["stdbuf", "-oL"], ["timeout", "60"]),
        *(
            ["ionice", "-c3"],
            ["taskset", "-c", "0"],
            ["prlimit", "--core=0"],
            ["time"],
            ["numactl", "-l"],
            ["tini", "--"],
        ),
    ],
    ids=lambda words: words[0],
)
def test_wrappers_hand_on_what_stands_at_the_end_and_the_environment(wrapper):
    if shutil.which(wrapper[0]) is None:
        pytest.skip(f"no {wrapper[0]} here")
    program = "import os, sys; print(os.environ['A_VARIABLE'], sys.argv[-1])"
    command = [*wrapper, sys.executable, "-c", program, "at the end"]
    environment = {**os.environ, "A_VARIABLE": "seen"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "seen at the end"
    assert read([*wrapper, "vllm", "serve", "m"]).arguments == ("m",)


@pytest.mark.parametrize("key", ["command", "args"])
@pytest.mark.parametrize("value", ["vllm serve", {"a": 1}, ["--port", 80], [None], 3])
def test_what_kubernetes_would_refuse_is_skipped_with_advice(key, value):
    with pytest.raises(Skip, match=f"{key} is not a list of strings. Quote numbers") as caught:
        commands.read({"name": "c", key: value})
    assert caught.value.reason is SkipReason.UNSUPPORTED_POD


def test_an_image_that_is_no_text_names_nothing():
    assert not commands.read({"name": "c", "image": ["vllm"]}).mentions_vllm


@pytest.mark.parametrize(
    ("image", "is_vllm", "is_server"),
    [
        ("vllm/vllm-openai", True, True),
        ("vllm/vllm-openai:v0.32.0-x86_64", True, True),
        ("LOCALHOST:5000/vllm-cpu", True, True),
        ("registry.redhat.io/rhaiis/vllm-cuda-rhel9:3", True, True),
        ("vllm-router", True, False),
        ("ghcr.io/vllm-project/semantic-router:1", False, False),
        ("my.vllm/image:vllm", False, False),
        ("", False, False),
    ],
)
def test_images_are_known_by_the_last_part_of_their_name(image, is_vllm, is_server):
    assert (images.is_vllm_image(image), images.is_server_image(image)) == (is_vllm, is_server)
