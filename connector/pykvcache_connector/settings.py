"""`kv_connector_extra_config`, parsed once into frozen settings.

Strict: an option that is unknown or misspelt is an error that suggests the nearest name. vLLM's own keys, which share
the dictionary, pass through. docs/configuration.md is generated from the fields below.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.units import parse_size

VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
    }
)
"""Keys of vLLM's offloading connector (0.22 … 0.33) that share the dictionary with our options."""

Size = Annotated[int, BeforeValidator(parse_size)]


class Settings(BaseModel):
    """All options of the connector. Sizes take bytes or text such as `64GiB`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: str = Field(
        description="Pool directory: an absolute path on the disk that keeps the blocks. It must exist.",
        json_schema_extra={"unit": "path", "change": "Always: it has no default."},
    )
    capacity: Size = Field(
        default=0,
        gt=0,
        description=(
            "Most bytes that blocks of this pool may take on the disk. Stores beyond it are declined. Default: what a "
            "sidecar allows; 64 GiB if there never was one."
        ),
        json_schema_extra={
            "unit": "bytes",
            "change": "Where no sidecar looks after the pool: to the share of the disk that the cache may use.",
        },
    )
    staging: Size = Field(
        default=1 << 30,
        gt=0,
        description="Staging memory of one worker process (one per GPU): a hard limit, pinned where there is a GPU.",
        json_schema_extra={
            "unit": "bytes",
            "change": "Up, when `pykvcache_staging_slots_used` stays at its limit; 16 to 32 blocks are plenty.",
        },
    )
    engine: Literal["auto", "uring", "threads"] = Field(
        default="auto",
        description="How files are read and written. `auto` takes io_uring where the kernel allows it.",
        json_schema_extra={"unit": "", "change": "To pin one for a comparison; `uring` then fails where forbidden."},
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether files bypass the page cache (O_DIRECT). `auto` does where the filesystem can.",
        json_schema_extra={"unit": "", "change": "To `off` on a filesystem whose page cache you want to use."},
    )
    depth: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Most reads and writes in flight at once in one worker.",
        json_schema_extra={"unit": "operations", "change": "Up, on arrays of disks or network filesystems."},
    )
    fsync: bool = Field(
        default=False,
        description="Whether a block is made durable before it is published. Integrity never depends on it.",
        json_schema_extra={"unit": "", "change": "To `true`, if blocks must survive a power cut; stores get slower."},
    )
    integrity: Literal["payload", "header"] = Field(
        default="payload",
        description="What is checked before a block is used: header and every byte of the payload, or only the header.",
        json_schema_extra={"unit": "", "change": "Leave it: the check costs under 10 % of a load's time."},
    )
    loading: Literal["auto", "streaming", "staged"] = Field(
        default="auto",
        description=(
            "`streaming` reads blocks while they are loaded; `staged` reads all of a prefix into staging memory before "
            "vLLM is promised it. `auto` streams where vLLM can recompute a failed block: with one group of full "
            "attention."
        ),
        json_schema_extra={
            "unit": "",
            "change": "To `staged`, if GPU blocks must not wait for the disk; prefixes are cut to the staging memory.",
        },
    )
    load_bytes_in_flight: Size = Field(
        default=8 << 30,
        gt=0,
        description="Most bytes of loads outstanding in one engine; further requests wait their turn.",
        json_schema_extra={
            "unit": "bytes",
            "change": "Down, when waiting loads take GPU blocks from running requests.",
        },
    )
    lookup_timeout_seconds: float = Field(
        default=0.25,
        gt=0,
        le=60,
        description="How long a request may wait for the answer which of its blocks exist; then it is a miss.",
        json_schema_extra={"unit": "seconds", "change": "Up, on a network filesystem with slow metadata."},
    )
    load_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long a load may take; blocks that are late are recomputed.",
        json_schema_extra={"unit": "seconds", "change": "Down, where recomputing the longest prompt takes less."},
    )

    when_unfit: Literal["error", "adapt"] = Field(
        default="error",
        description=(
            "What happens where these options do not suit the model or vLLM: `error` stops vLLM and says what to "
            "change. With `adapt` vLLM starts in any case: `block_size` is made to fit, and whatever else does not fit "
            "turns the cache off."
        ),
        json_schema_extra={
            "unit": "",
            "change": "To `adapt`, where vLLM must start in any case; injected pods have it.",
        },
    )
    create_pool: bool = Field(
        default=True,
        description=(
            "Whether an empty pool directory becomes a pool. With `false` the cache is off until something else, a "
            "sidecar or the node agent, has made it one."
        ),
        json_schema_extra={"unit": "", "change": "To `false`, where an empty directory means that no disk is mounted."},
    )

    trace: str = Field(
        default="",
        description=(
            "File to which a line is appended for every request: which blocks it asks for, as hashes, never tokens. "
            "Input of `pykvcache-sidecar simulate`. An absolute path; empty: none. It ends at 1 GiB."
        ),
        json_schema_extra={"unit": "path", "change": "To find out which capacity and policy suit your requests."},
    )

    @field_validator("trace")
    @classmethod
    def _absolute_or_empty(cls, value: str) -> str:
        return cls._absolute(value) if value else value

    @field_validator("pool")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not os.path.isabs(value):
            raise ValueError(f"{value!r} is not an absolute path")
        return os.path.normpath(value)

    @staticmethod
    def adapts(extra_config: Mapping[str, Any]) -> bool:
        """Return whether `when_unfit` is `adapt`, also where the options as a whole are wrong."""
        return extra_config.get("when_unfit") == "adapt"

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> "Settings":
        """Return the settings in vLLM's `kv_connector_extra_config`.

        Raises:
            ConfigurationError: names every wrong option, its value and what to write instead.
        """
        ours = {key: value for key, value in extra_config.items() if key not in VLLM_KEYS}
        try:
            return cls.model_validate(ours)
        except ValidationError as error:
            lines = [_explain(item) for item in error.errors()]
            raise ConfigurationError("kv_connector_extra_config: " + "; ".join(lines)) from error


def _explain(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, [*Settings.model_fields, *VLLM_KEYS], n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"options are {', '.join(sorted(Settings.model_fields))}"
        return f"unknown option '{name}': {hint}"
    if item["type"] == "missing":
        return f"option '{name}' is missing: {Settings.model_fields[name].description}"
    return f"option '{name}' = {item['input']!r}: {item['msg']}"
