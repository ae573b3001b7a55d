"""Manifests of Kubernetes as people write them: read with their comments, changed in place, written back.

YAML goes through ruamel's round trip, which keeps comments, order, quotes and anchors; the indentation of lists is
taken from the text. JSON stays JSON. A document is a tree of mappings and lists that behave like dict and list.
"""

import copy
import io
import json
import re
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pykvcache_contract.errors import ConfigurationError

_WIDTH = 2**20
"""Lines are never broken: a long argument stays one line, as it was written."""
_INDENTED_LIST = re.compile(r"^( *)[^\s#-][^\n#]*:[ ]*\n(?:[ ]*(?:#[^\n]*)?\n)*( *)- ", re.MULTILINE)
_HELM = re.compile(r"{{.*?}}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One file: where it came from, its text, and its documents, which may be changed in place."""

    source: str
    text: str
    documents: list[Any]
    is_json: bool

    def objects(self) -> Iterator[MutableMapping[str, Any]]:
        """Yield each Kubernetes object, also those inside of a List."""
        for document in self.documents:
            items = document.get("items") if isinstance(document, MutableMapping) else None
            if isinstance(items, list) and str(document.get("kind", "")).endswith("List"):
                yield from (item for item in items if isinstance(item, MutableMapping))
            elif isinstance(document, MutableMapping):
                yield document

    def render(self) -> str:
        """Return the text of the documents as they are now."""
        if self.is_json and json.loads(self.text) == self.documents[0]:
            return self.text
        if self.is_json:
            return json.dumps(self.documents[0], indent=_json_indent(self.text), ensure_ascii=False) + "\n"
        output = io.StringIO()
        yaml = _yaml(self.text)
        yaml.explicit_start = self.text.lstrip().startswith("---")
        yaml.dump_all(self.documents, output)
        return output.getvalue()


def parse_manifest(text: str, *, source: str) -> Manifest:
    """Return the documents of a text.

    Raises:
        ConfigurationError: it is neither YAML nor JSON; the message names the place.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            return Manifest(source, text, [json.loads(text)], is_json=True)
        except json.JSONDecodeError:
            pass  # a flow mapping of YAML, perhaps
    try:
        documents = list(_yaml(text).load_all(text))
        plain(documents)
        return Manifest(source, text, documents, is_json=False)
    except (YAMLError, ValueError, RecursionError, ConfigurationError) as error:
        raise ConfigurationError(f"{source}: {_explain(error, text)}") from error


def plain(node: Any) -> Any:
    """Return a part of a document as plain JSON: dicts, lists, strings, numbers; dates become text.

    Raises:
        ConfigurationError: it refers to itself, or a key is not a scalar.
    """
    try:
        return json.loads(json.dumps(node, default=str))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"a document cannot be written as JSON: {error}") from error


def change(node: MutableMapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Make a mapping equal to the wanted one; what is equal already keeps its comments, order and style."""
    for key in [key for key in node if key not in wanted]:
        del node[key]
    for key, value in wanted.items():
        if key not in node or plain(node[key]) != value:
            node[key] = _changed(node[key], value) if key in node else copy.deepcopy(value)


def _changed(node: Any, wanted: Any) -> Any:
    if isinstance(node, MutableMapping) and isinstance(wanted, Mapping):
        change(node, wanted)
        return node
    if isinstance(node, MutableSequence) and isinstance(wanted, list):
        _change_list(node, wanted)
        return node
    return copy.deepcopy(wanted)


def _change_list(node: MutableSequence[Any], wanted: list[Any]) -> None:
    """Walk the wanted list: an entry that is not there is inserted, one with the same name is changed in its place."""
    for position, value in enumerate(wanted):
        if position < len(node) and (_is_same(node[position], value) or len(node) >= len(wanted)):
            node[position] = _changed(node[position], value)
        else:
            node.insert(position, copy.deepcopy(value))
    while len(node) > len(wanted):
        del node[len(wanted)]


def _is_same(node: Any, wanted: Any) -> bool:
    """Say whether two entries of a list are the same thing, perhaps changed: containers, volumes, variables by name."""
    if isinstance(node, Mapping) and isinstance(wanted, Mapping) and "name" in wanted:
        return bool(node.get("name") == wanted["name"])
    return bool(plain(node) == wanted)


def _yaml(text: str) -> YAML:
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    found = _INDENTED_LIST.search(text)
    offset = len(found[2]) - len(found[1]) if found else 2
    yaml.indent(mapping=2, sequence=max(0, offset) + 2, offset=max(0, offset))
    return yaml


def _json_indent(text: str) -> int | None:
    found = re.search(r"\n( +)\S", text)
    return len(found[1]) if found else None


def _explain(error: Exception, text: str) -> str:
    if _HELM.search(text):
        return (
            "this is a template with {{ … }}, not a manifest. Render it first: helm template … | pykvcache inject -f -"
        )
    where = getattr(error, "problem_mark", None)
    place = f"line {where.line + 1}: " if where else ""
    return f"{place}{getattr(error, 'problem', None) or error}"
