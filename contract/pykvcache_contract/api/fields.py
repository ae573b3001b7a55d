"""Between frozen dataclasses and JSON objects of the API, driven by what each field says about itself.

A field's metadata holds its text for `kubectl explain`, its bounds and its spelling in the API; `parse`, `to_dict` and
the generator of the CRDs read the same metadata. Reading tolerates fields that it does not know, because a newer
version may have written them, and checks those that it knows, because the CRD in a cluster may be older than this code.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime, timezone
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pykvcache_contract.api.quantities import format_duration, format_quantity, parse_duration, parse_quantity
from pykvcache_contract.errors import ConfigurationError

T = TypeVar("T")
_METADATA_KEY = "pykvcache"


class Form(Enum):
    """How a number is written in the API."""

    PLAIN = "plain"
    QUANTITY = "quantity"  # bytes in Python, 800Gi in the API
    DURATION = "duration"  # seconds in Python, 720h in the API


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a field says about itself; `name` is its spelling in the API where camelCase of the Python name is not."""

    text: str
    name: str = ""
    form: Form = Form.PLAIN
    minimum: int | None = None
    maximum: int | None = None
    pattern: str = ""
    pattern_text: str = ""
    max_length: int = 253
    max_items: int = 64
    map_key: str = ""
    clipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiField:
    """One field of an API object: where it is in Python and in JSON, its type without `| None`, and its default."""

    attribute: str
    name: str
    type: Any
    said: Said
    default: Any  # MISSING: the field is required
    derived: bool  # computed from other fields of the object, never read

    @property
    def required(self) -> bool:
        return self.default is MISSING and not self.derived


_FIELDS: dict[type, tuple[ApiField, ...]] = {}


def says(text: str, **facts: Any) -> dict[str, Said]:
    """Return the metadata of a field: its text for `kubectl explain`, and `Said`'s other facts.

    `pattern` (a whole match, explained by `pattern_text`) and `max_length` are about strings, also those in a list or
    map; `max_items` is about lists and maps; `map_key` names the key of a list-map; a `clipped` string is cut to
    `max_length` when it is written instead of being refused.
    """
    return {_METADATA_KEY: Said(text=text, **facts)}


def api_fields(kind: type) -> tuple[ApiField, ...]:
    """Return the fields of a dataclass of the API, in their order."""
    if kind not in _FIELDS:
        _FIELDS[kind] = _read_fields(kind)
    return _FIELDS[kind]


def _read_fields(kind: type) -> tuple[ApiField, ...]:
    hints = get_type_hints(kind)
    return tuple(
        ApiField(
            attribute=field.name,
            name=field.metadata[_METADATA_KEY].name or camel_case(field.name),
            type=_without_none(hints[field.name]),
            said=field.metadata[_METADATA_KEY],
            default=field.default_factory() if field.default_factory is not MISSING else field.default,
            derived=not field.init,
        )
        for field in fields(kind)
    )


def derive(value: Any, **texts: str) -> None:
    """Set the derived fields of a frozen object that is being made; `kubectl get` can print them and cannot compute."""
    for attribute, text in texts.items():
        object.__setattr__(value, attribute, text)


def camel_case(name: str) -> str:
    """Return a Python name in the API's spelling.

    >>> camel_case("min_ready_nodes")
    'minReadyNodes'
    """
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def parse(kind: type[T], document: object, path: str) -> T:
    """Return an object of the API from its JSON; `null` means absent, unknown fields are left out.

    Raises:
        ConfigurationError: a field is missing, has a wrong type or is out of bounds; the message starts with its path.
    """
    if not isinstance(document, Mapping):
        raise _wrong(path, "an object", document)
    values = {}
    for field in api_fields(kind):
        raw = None if field.derived else document.get(field.name)
        if raw is not None:
            values[field.attribute] = _parse_value(field.type, field.said, raw, f"{path}.{field.name}")
        elif field.required:
            raise ConfigurationError(f"{path}.{field.name} is missing: {field.said.text}")
    return kind(**values)


def to_dict(value: Any) -> dict[str, Any]:
    """Return the JSON of an object of the API.

    Absent values and empty optional texts are left out; zeros, false and empty lists are not, so that a manager of
    server-side apply owns what it says.

    Raises:
        ConfigurationError: a value is out of the bounds of its field (programmer error).
    """
    document = {}
    for field in api_fields(type(value)):
        content = getattr(value, field.attribute)
        if content is not None and (content != "" or field.required):
            document[field.name] = _format_value(field.said, content, field.name)
    return document


def _without_none(hint: Any) -> Any:
    if get_origin(hint) is UnionType:
        (hint,) = (argument for argument in get_args(hint) if argument is not NoneType)
    return hint


def _parse_value(hint: Any, said: Said, raw: Any, path: str) -> Any:
    if hint is int or hint is str or hint is bool:  # most of all values
        return _parse_scalar(hint, said, raw, path)
    if get_origin(hint) is tuple:
        if not isinstance(raw, list):
            raise _wrong(path, "a list", raw)
        _check_count(said, len(raw), path)
        return tuple(
            _parse_value(get_args(hint)[0], said, item, f"{path}[{number}]") for number, item in enumerate(raw)
        )
    if get_origin(hint) is Mapping:
        return _parse_map(said, raw, path)
    if issubclass(hint, Enum):
        return _parse_enum(hint, raw, path)
    if hint is datetime:
        return _parse_time(raw, path)
    return parse(hint, raw, path)


def _parse_map(said: Said, raw: Any, path: str) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise _wrong(path, "an object", raw)
    _check_count(said, len(raw), path)
    return {key: _parse_scalar(str, said, value, f"{path}[{key!r}]") for key, value in raw.items()}


def _parse_enum(hint: type[Enum], raw: Any, path: str) -> Enum:
    try:
        return hint(raw)
    except ValueError:
        raise ConfigurationError(f"{path} is {raw!r}, not {choices(hint)}") from None


def choices(kind: type[Enum]) -> str:
    """Return the values of an enum for people: `Namespace or Pool`."""
    return " or ".join(str(member.value) for member in kind)


def _parse_time(raw: Any, path: str) -> datetime:
    try:
        moment = datetime.fromisoformat(raw.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (AttributeError, ValueError, OverflowError):
        raise _wrong(path, "a time such as 2026-01-31T12:00:00Z", raw) from None


def _parse_scalar(hint: Any, said: Said, raw: Any, path: str) -> Any:
    if said.form is not Form.PLAIN:
        try:
            raw = parse_quantity(raw) if said.form is Form.QUANTITY else parse_duration(raw)
        except ValueError as error:
            raise ConfigurationError(f"{path}: {error}") from None
    if type(raw) is not hint:
        raise _wrong(path, {bool: "true or false", int: "a whole number", str: "a text"}[hint], raw)
    _check(said, raw, path)
    return raw


def _format_value(said: Said, value: Any, path: str) -> Any:
    if isinstance(value, tuple):
        _check_count(said, len(value), path)
        return [_format_value(said, item, path) for item in value]
    if isinstance(value, Mapping):
        _check_count(said, len(value), path)
        return {key: _format_value(said, item, path) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(value, (bool, int, str)):
        return _format_scalar(said, value, path)
    return to_dict(value)


def _format_scalar(said: Said, value: bool | int | str, path: str) -> bool | int | str:
    if isinstance(value, str):
        text = value[: said.max_length - 1] + "…" if said.clipped and len(value) > said.max_length else value
        _check(said, text, path)
        return text
    _check(said, value, path)
    if said.form is Form.QUANTITY:
        return format_quantity(value)
    return format_duration(value) if said.form is Form.DURATION else value


def _check(said: Said, value: bool | int | str, path: str) -> None:
    if isinstance(value, str):
        if len(value) > said.max_length:
            raise ConfigurationError(f"{path} has {len(value)} characters, at most {said.max_length} are allowed")
        if said.pattern and re.fullmatch(said.pattern, value) is None:
            raise ConfigurationError(f"{path} is {value!r}; write {said.pattern_text}")
    elif said.minimum is not None and value < said.minimum:
        raise ConfigurationError(f"{path} is {value}, at least {said.minimum} is needed")
    elif said.maximum is not None and value > said.maximum:
        raise ConfigurationError(f"{path} is {value}, at most {said.maximum} is allowed")


def _check_count(said: Said, count: int, path: str) -> None:
    if count > said.max_items:
        raise ConfigurationError(f"{path} has {count} entries, at most {said.max_items} are allowed")


def _wrong(path: str, wanted: str, raw: object) -> ConfigurationError:
    return ConfigurationError(f"{path} must be {wanted}, not {type(raw).__name__} {str(raw)[:60]!r}")
