"""vLLM's plugin: what it does to arguments and command lines; whatever is wrong, vLLM gets a configuration."""

import copy
import json
import logging
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from pykvcache_connector import engine_args, plugin, preflight, transfer_configs
from pykvcache_contract import names

OURS = {
    "kv_connector": names.CONNECTOR_CLASS,
    "kv_connector_module_path": names.CONNECTOR_MODULE,
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"pool": "/cache", "when_unfit": "adapt"},
}
THEIRS = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
OTHER = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


def multi(*children):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


@dataclass
class Arguments:
    """vLLM's EngineArgs as far as the plugin goes, with what vLLM refuses."""

    kv_transfer_config: Any = None
    prefix_caching_hash_algo: str = "sha256"
    kv_offloading_size: float | None = None
    model: str = "m"
    refuses_ours: bool = False
    refuses_hash: str = ""
    always_refuses: str = ""
    is_encoder_decoder: bool = False
    enable_mm_embeds: bool = False
    is_ec_consumer: bool = False
    leaves: list[str] = field(default_factory=list)

    def create(self):
        """Do as vLLM: change the arguments themselves, and refuse some."""
        left_behind = list(self.leaves)
        self.leaves.append("resolved")
        self.model += "!"
        if self.always_refuses:
            raise ValueError(self.always_refuses)
        if self.refuses_ours and transfer_configs.has_ours(self.kv_transfer_config):
            raise ValueError("no connectors here")
        if self.prefix_caching_hash_algo == self.refuses_hash:
            raise ValueError("unknown hash")
        opens = self.is_ec_consumer or self.kv_transfer_config is not None
        inputs = SimpleNamespace(allow_missing_mm_embeddings=opens, enable_mm_embeds=opens or self.enable_mm_embeds)
        model = SimpleNamespace(is_encoder_decoder=self.is_encoder_decoder, multimodal_config=inputs)
        return SimpleNamespace(
            kv_transfer_config=self.kv_transfer_config,
            hash=self.prefix_caching_hash_algo,
            model_config=model,
            parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
            ec_transfer_config=SimpleNamespace(is_ec_consumer=self.is_ec_consumer),
            left_behind=left_behind,
        )


def create(arguments, transfer_config=""):
    if isinstance(transfer_config, dict):
        transfer_config = json.dumps(transfer_config)
    return engine_args.create(arguments, arguments.create, transfer_config)


@pytest.fixture
def log(caplog):
    """What was logged, one text for a line; vLLM's own handlers take no part."""
    caplog.set_level(logging.DEBUG, "vllm.pykvcache")
    logger = logging.getLogger("vllm.pykvcache")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in dict.fromkeys(caplog.records)]
    logger.removeHandler(caplog.handler)


@pytest.fixture
def unfit(monkeypatch):
    monkeypatch.setattr(preflight, "why_unfit", lambda: "this image has something else")


# ---- our part in a configuration ----


@pytest.mark.parametrize(
    ("config", "rest"),
    [
        (OURS, None),
        (THEIRS, THEIRS),
        (multi(THEIRS, OURS), THEIRS),
        (multi(OURS, THEIRS, OTHER), multi(THEIRS, OTHER)),
        (multi(OURS), None),
        (multi(THEIRS, OTHER), multi(THEIRS, OTHER)),
        (multi(THEIRS, multi(OURS, OTHER)), THEIRS),
        ({}, {}),
        (multi(OURS) | {"kv_connector_extra_config": {"connectors": "nonsense"}}, ...),
        (multi(OURS) | {"kv_connector_extra_config": None}, ...),
    ],
)
def test_only_our_part_is_taken_out_of_a_configuration(config, rest):
    before = copy.deepcopy(config)
    assert (config if rest is ... else rest) == transfer_configs.without_ours(config)
    assert before == config


@pytest.mark.parametrize(
    ("config", "rest"),
    [(OURS, None), (multi(THEIRS, OURS), THEIRS), (multi(OURS, THEIRS, OTHER), multi(THEIRS, OTHER))],
)
def test_the_same_holds_for_vllms_own_object(config, rest):
    given = KVTransferConfig(**config)
    left = transfer_configs.without_ours(given)
    if rest is None:
        assert left is None
    else:
        assert isinstance(left, KVTransferConfig)
        assert rest["kv_connector"] == left.kv_connector
        assert rest.get("kv_connector_extra_config", {}) == left.kv_connector_extra_config
    assert transfer_configs.has_ours(given)


def test_nothing_is_taken_out_of_nothing():
    assert transfer_configs.without_ours(None) is None
    assert not transfer_configs.has_ours(None)


FLAG, HASH = ["--kv-transfer-config"], ["--prefix-caching-hash-algo", "sha256_cbor"]


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (["serve", "m", *HASH, *FLAG, json.dumps(OURS)], ["serve", "m"]),
        (["serve", "m", *HASH, "--port", "1", *FLAG, json.dumps(OURS)], ["serve", "m", *HASH, "--port", "1"]),
        (
            ["serve", *FLAG, json.dumps(THEIRS), *FLAG, json.dumps(multi(THEIRS, OURS))],
            ["serve", *FLAG, json.dumps(THEIRS), *FLAG, json.dumps(THEIRS)],
        ),
        (["serve", *FLAG, json.dumps(OURS), *FLAG, json.dumps(THEIRS)], ...),
        (["serve", *HASH], ...),
        (["serve", *FLAG], ...),
        (["serve", *FLAG, "{nonsense"], ...),
        (["serve", *FLAG, "[1]"], ...),
        ([], ...),
    ],
)
def test_only_what_injection_appended_is_taken_out_of_a_command_line(command, left):
    assert (command if left is ... else left) == transfer_configs.without_our_arguments(command)


# ---- the arguments of an engine ----


def test_an_engine_without_a_configuration_gets_ours_and_a_stable_hash(log):
    config = create(Arguments(), OURS)
    assert names.CONNECTOR_CLASS == config.kv_transfer_config.kv_connector
    assert OURS["kv_connector_extra_config"] == config.kv_transfer_config.kv_connector_extra_config
    assert "sha256_cbor" == config.hash
    assert [] == log()


def test_a_hash_of_the_users_choice_stays():
    assert "xxhash" == create(Arguments(prefix_caching_hash_algo="xxhash"), OURS).hash


def test_a_configuration_of_the_users_own_stays_and_the_log_says_so(log):
    theirs = KVTransferConfig(**THEIRS)
    config = create(Arguments(theirs), OURS)
    assert theirs == config.kv_transfer_config
    assert "sha256" == config.hash
    (line,) = log()
    assert line.startswith("py-kvcache is off: vLLM is given a kv-transfer-config of its own, with ExampleConnector.")


def test_engines_that_have_nothing_to_do_with_us_are_left_alone(log, unfit):
    arguments = Arguments(KVTransferConfig(**THEIRS), always_refuses="wrong model")
    with pytest.raises(ValueError, match="wrong model"):
        create(arguments)
    assert "m!" == arguments.model
    assert [] == log()


@pytest.mark.parametrize("text", ["{nonsense", "[]", "3", '{"kv_connector": "PyKVCacheConnector"}', '{"from_2027": 1}'])
def test_a_configuration_that_vllm_does_not_take_is_none(log, text):
    assert create(Arguments(), text).kv_transfer_config is None
    (line,) = log()
    assert "does not take the kv-transfer-config of injection" in line


@pytest.mark.parametrize("how", ["environment", "arguments", "beside another"])
def test_an_image_that_cannot_have_the_cache_starts_without_it(log, unfit, how):
    given = {"environment": None, "arguments": OURS, "beside another": multi(THEIRS, OURS)}[how]
    config = create(Arguments(given and KVTransferConfig(**given)), OURS if given is None else "")
    left = config.kv_transfer_config
    assert ("ExampleConnector" if how == "beside another" else None) == (left and left.kv_connector)
    assert "sha256" == config.hash
    assert ["py-kvcache is off: this image has something else. vLLM starts without the cache."] == log()


def test_what_vllm_refuses_only_because_of_us_is_tried_without_us_as_if_for_the_first_time(log):
    arguments = Arguments(KVTransferConfig(**OURS), refuses_ours=True)
    config = create(arguments)
    assert config.kv_transfer_config is None
    assert [] == config.left_behind
    assert "m!" == arguments.model
    (line,) = log()
    assert "vLLM does not start with it: ValueError: no connectors here" in line


def test_a_hash_that_vllm_does_not_know_is_given_up_too():
    config = create(Arguments(refuses_hash="sha256_cbor"), OURS)
    assert config.kv_transfer_config is None
    assert "sha256" == config.hash


def test_what_vllm_refuses_anyway_is_raised_as_it_is(log):
    with pytest.raises(ValueError, match="wrong model") as caught:
        create(Arguments(KVTransferConfig(**OURS), always_refuses="wrong model"))
    assert caught.value.__context__ is None
    assert [] == log(), "the cache is not to blame"


def test_a_mistake_of_ours_costs_the_cache_and_not_the_start(monkeypatch, log):
    monkeypatch.setattr(engine_args, "_keep_inputs_closed", lambda arguments, config: 1 / 0)
    assert create(Arguments(), OURS).kv_transfer_config is None
    assert "a mistake of ours, please report it: ZeroDivisionError" in log()[0]


def test_arguments_without_such_a_field_are_those_of_an_old_vllm(log):
    arguments = Arguments()
    del arguments.kv_transfer_config
    arguments.create = lambda: "made"
    assert "made" == create(arguments, OURS)
    assert 1 == len(log())


def test_a_long_error_is_cut(log):
    long = Arguments(KVTransferConfig(**OURS), refuses_ours=True)
    long.create = lambda: (_ for _ in ()).throw(ValueError("x\n" * 9999)) if long.kv_transfer_config else "made"
    assert "made" == create(long)
    (line,) = log()
    assert len(line) < 800
    assert "\n" not in line


def test_models_for_which_vllm_has_no_connectors_start_without(log):
    assert create(Arguments(KVTransferConfig(**OURS), is_encoder_decoder=True)).kv_transfer_config is None
    assert "encoder-decoder" in log()[0]


@pytest.mark.parametrize(
    ("transfer", "options", "is_open", "may_be_missing"),
    [
        (OURS, {}, False, False),
        (OURS, {"enable_mm_embeds": True}, True, False),
        (OURS, {"is_ec_consumer": True}, True, True),
        (multi(THEIRS, OURS), {}, True, True),
        (THEIRS, {}, True, True),
    ],
)
def test_the_cache_lets_no_client_send_tensors(transfer, options, is_open, may_be_missing):
    inputs = create(Arguments(KVTransferConfig(**transfer), **options)).model_config.multimodal_config
    assert is_open == inputs.enable_mm_embeds
    assert may_be_missing == inputs.allow_missing_mm_embeddings


def test_offloading_of_the_users_own_comes_first(log):
    config = create(Arguments(kv_offloading_size=4.0), OURS)
    assert config.kv_transfer_config is None
    assert "--kv-offloading-size" in log()[0]


def test_arguments_that_cannot_be_copied_do_no_harm():
    assert create(Arguments(leaves=Uncopyable()), OURS).kv_transfer_config is not None


class Uncopyable(list):
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def test_a_multi_connector_that_hides_blocks_from_its_parts_goes_without_us(monkeypatch, log):
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    def as_in_022(self, request, blocks, num_external_tokens):
        return blocks.new_empty()

    monkeypatch.setattr(MultiConnector, "update_state_after_alloc", as_in_022)
    config = create(Arguments(KVTransferConfig(**multi(THEIRS, OURS))))
    assert "ExampleConnector" == config.kv_transfer_config.kv_connector
    assert "Use vLLM 0.26 or later to have both" in log()[0]
    assert create(Arguments(KVTransferConfig(**OURS))).kv_transfer_config is not None


def test_parts_of_a_multi_connector_are_known_to_vllm_by_name():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for _ in range(2):
        engine_args._make_known(KVTransferConfig(**multi(THEIRS, OURS)))
    found = KVConnectorFactory.get_connector_class_by_name(names.CONNECTOR_CLASS)
    assert names.CONNECTOR_CLASS == found.__name__


# ---- in vLLM's process ----


@pytest.fixture
def original(monkeypatch):
    """vLLM's method, put back after the test."""
    method = EngineArgs.create_engine_config
    monkeypatch.setattr(EngineArgs, "create_engine_config", method)
    monkeypatch.delenv(names.INJECTED_VARIABLE, raising=False)
    return method


def test_outside_of_injected_containers_nothing_is_touched(original, monkeypatch, unfit):
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", *FLAG, json.dumps(OURS)])
    monkeypatch.setenv(names.TRANSFER_CONFIG_VARIABLE, json.dumps(OURS))
    plugin.register()
    assert original is EngineArgs.create_engine_config
    assert ["vllm", "serve", *FLAG, json.dumps(OURS)] == sys.argv


def test_registering_twice_wraps_once_and_for_the_asynchronous_engine_too(original, monkeypatch):
    monkeypatch.setenv(names.INJECTED_VARIABLE, "0.2.0")
    plugin.register()
    wrapped = EngineArgs.create_engine_config
    plugin.register()
    assert original is not wrapped
    assert wrapped is EngineArgs.create_engine_config is AsyncEngineArgs.create_engine_config
    assert original is wrapped.__wrapped__


def test_flags_that_an_old_vllm_does_not_know_never_reach_it(original, monkeypatch, unfit, log):
    monkeypatch.setenv(names.INJECTED_VARIABLE, "0.2.0")
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m", *HASH, *FLAG, json.dumps(OURS)])
    plugin.register()
    assert ["vllm", "serve", "m"] == sys.argv
    assert 1 == len(log())


def test_flags_stay_where_the_cache_works(original, monkeypatch, log):
    command = ["vllm", "serve", "m", *HASH, *FLAG, json.dumps(OURS)]
    monkeypatch.setenv(names.INJECTED_VARIABLE, "0.2.0")
    monkeypatch.setattr(sys, "argv", list(command))
    plugin.register()
    assert command == sys.argv
    assert [] == log()


def test_a_mistake_of_the_plugin_does_not_reach_vllm(original, monkeypatch, log):
    monkeypatch.setenv(names.INJECTED_VARIABLE, "0.2.0")
    monkeypatch.setattr(engine_args, "install", lambda text: 1 / 0)
    plugin.register()
    assert ["py-kvcache: its vLLM plugin failed, please report it: ZeroDivisionError: division by zero"] == log()


def test_vllms_helpers_are_left_alone(monkeypatch):
    assert plugin.creates_engines()
    monkeypatch.delitem(sys.modules, plugin.ENGINE_ARGUMENTS_MODULE)
    assert plugin.creates_engines()
    inspector = SimpleNamespace(__spec__=SimpleNamespace(name="vllm.model_executor.models.registry"))
    monkeypatch.setitem(sys.modules, "__main__", inspector)
    assert not plugin.creates_engines()


# ---- the preflight ----


def test_this_environment_is_fit():
    assert "" == preflight.why_unfit()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'pydantic'", name="pydantic"), "Install it in the image"),
        (ModuleNotFoundError("No module named 'vllm.v1.kv_offload'", name="vllm.v1.kv_offload"), "0.22 to 0.33"),
        (ImportError("cannot import name 'X' from 'vllm.v1'", name="vllm.v1"), "0.22 to 0.33"),
        (AttributeError("module 'vllm' has no attribute 'x'"), "0.22 to 0.33"),
        (ModuleNotFoundError("No module named 'pykvcache_storage'", name="pykvcache_storage.pool"), "Delete the pod"),
        (SyntaxError("null bytes"), "Delete the pod"),
        (OSError("out of order"), "OSError: out of order). Please report it"),
    ],
)
def test_every_way_to_fail_has_its_remedy(monkeypatch, error, words):
    def refuse(name):
        raise error

    monkeypatch.setattr(preflight.importlib, "import_module", refuse)
    reason = preflight.why_unfit()
    assert reason.startswith("this image has vLLM ")
    assert words in reason
