"""`pykvcache inject`: what the webhook does to pods, done to manifests, without a cluster."""

import difflib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from pykvcache_cli.console import EXIT_PROBLEM, fail, printable, stderr
from pykvcache_cli.kubectl import PROGRAM as KUBECTL_PLUGIN
from pykvcache_cli.kubectl import pool_manifest
from pykvcache_cli.manifests import Manifest, change, parse_manifest, plain
from pykvcache_cli.pod_templates import PodTemplate, pod_templates
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import INJECTED_ANNOTATION, POOL_KIND, POOL_NAME_LABEL, SKIPPED_ANNOTATION
from pykvcache_operator.injection.containers import is_evident
from pykvcache_operator.injection.inject import inject
from pykvcache_operator.injection.outcome import InjectionSettings, Outcome, Result

STANDARD_INPUT = "-"
REGISTRY = "ghcr.io/py-kvcache"


@dataclass(frozen=True, slots=True)
class Told:
    """One template and what became of it."""

    template: PodTemplate
    outcome: Outcome


def command(
    context: typer.Context,
    files: list[str] = typer.Option(
        ..., "--filename", "-f", metavar="FILE", help="Manifests, YAML or JSON; - for standard input. May be repeated."
    ),
    pool: str = typer.Option(
        "",
        "--pool",
        metavar="NAME",
        help=f"Give this pool to every pod template that runs vLLM and has no label {POOL_NAME_LABEL}.",
    ),
    pool_file: list[str] = typer.Option(
        [],
        "--pool-file",
        metavar="FILE",
        help="Manifest with the KVCachePool, where -f does not hold it. May be repeated.",
    ),
    diff: bool = typer.Option(
        False, "--diff", help="Print what would change, as a unified diff, instead of the manifests."
    ),
    registry: str = typer.Option(
        REGISTRY, "--registry", metavar="NAME", help="Where the images are, as in the chart's images.registry."
    ),
    connector_image: str = typer.Option(
        "",
        "--connector-image",
        metavar="IMAGE",
        help="Whole name of the connector's image.  [default: REGISTRY/connector:VERSION]",
    ),
    sidecar_image: str = typer.Option(
        "",
        "--sidecar-image",
        metavar="IMAGE",
        help="Whole name of the sidecar's image.  [default: REGISTRY/sidecar:VERSION]",
    ),
    pull_secret: list[str] = typer.Option(
        [],
        "--pull-secret",
        metavar="NAME",
        help="Secret to pull these images with. May be repeated. A pod with one gets none from its service account.",
    ),
) -> None:
    """Add the cache to the vLLM pods of manifests, as the webhook would, and print the manifests.

    Every pod template with the label pykvcache.io/pool is changed, of any kind of object; --pool sets the label first.
    The pool itself must be known: a KVCachePool among the manifests or in --pool-file; as `kubectl pykvcache inject` it
    is also looked for in the cluster. Comments and order stay. What became of each template is told on stderr. A pod
    made from the result is left alone by the webhook.

    Exit status: 0 all were changed, or had been before; 1 one goes without the cache, see stderr; 2 bad input.

    Example: kubectl get kvcachepool default -o yaml > pool.yaml; pykvcache inject -f vllm.yaml --pool-file pool.yaml
    """
    try:
        manifests = [_read(name) for name in files]
        is_plugin = context.find_root().info_name == KUBECTL_PLUGIN
        pools = _Pools(_pools([*manifests, *map(_read, pool_file)]), from_cluster=is_plugin)
        settings = _settings(registry, connector_image, sidecar_image, tuple(pull_secret))
        tellings = [told for manifest in manifests for told in _inject_all(manifest, pools, settings, pool)]
    except ConfigurationError as error:
        fail(printable(str(error)))
    for manifest in manifests:
        _print(manifest, as_diff=diff, is_first=manifest is manifests[0])
    _tell(tellings)
    if any(told.outcome.result in (Result.SKIPPED, Result.REJECTED) for told in tellings):
        raise typer.Exit(EXIT_PROBLEM)


def _read(name: str) -> Manifest:
    try:
        text = sys.stdin.read() if name == STANDARD_INPUT else Path(name).read_text()
    except OSError as error:
        raise ConfigurationError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name}: not UTF-8 text: {error}") from error
    return parse_manifest(text, source="standard input" if name == STANDARD_INPUT else name)


def _pools(manifests: Iterable[Manifest]) -> dict[str, KVCachePool]:
    """Return the pools that the manifests declare; one that was never applied has no uid, which injection needs not."""
    pools = {}
    for manifest in manifests:
        for document in manifest.objects():
            if document.get("kind") == POOL_KIND:
                found = plain(document)
                found["metadata"] = {"uid": "", "generation": 0, **(found.get("metadata") or {})}
                parsed = KVCachePool.parse(found)
                pools[parsed.name] = parsed
    return pools


class _Pools(dict[str, KVCachePool]):
    """Pools by name; one that no manifest declares is looked for in the cluster, if that is allowed."""

    def __init__(self, declared: Mapping[str, KVCachePool], *, from_cluster: bool) -> None:
        super().__init__(declared)
        self._from_cluster = from_cluster

    def __missing__(self, name: str) -> KVCachePool:
        if not self._from_cluster:
            raise ConfigurationError(
                f"the pool {name} is not known here. Give its manifest by --pool-file; of a cluster: "
                f"kubectl get kvcachepool {name} -o yaml"
            )
        self.update(_pools([parse_manifest(pool_manifest(name), source=f"pool {name}")]))
        return self[name]


def _settings(registry: str, connector: str, sidecar: str, secrets: tuple[str, ...]) -> InjectionSettings:
    version = importlib.metadata.version("py-kvcache")
    return InjectionSettings(
        version=version,
        connector_image=connector or f"{registry}/connector:{version}",
        sidecar_image=sidecar or f"{registry}/sidecar:{version}",
        pull_secrets=secrets,
    )


def _inject_all(
    manifest: Manifest, pools: Mapping[str, KVCachePool], settings: InjectionSettings, default_pool: str
) -> Iterator[Told]:
    for document in manifest.objects():
        for template in pod_templates(document):
            yield from _inject_one(template, pools, settings, default_pool)


def _inject_one(
    template: PodTemplate, pools: Mapping[str, KVCachePool], settings: InjectionSettings, default_pool: str
) -> Iterator[Told]:
    is_ours_to_label = bool(default_pool) and not template.pool_name
    name = template.pool_name or default_pool
    if not name:
        return
    pod = _as_pod(template, name)
    if INJECTED_ANNOTATION not in (pod["metadata"].get("annotations") or {}):
        pools[name]  # or an error that says how to make it known
    outcome = inject(pod, pools=pools, namespace=None, settings=settings)
    if is_ours_to_label and not _runs_vllm(pod, outcome):
        return  # nobody said it does
    if outcome.result is Result.INJECTED:
        outcome = _with_pull_warning(outcome, pod, settings)
        change(template.node, _as_template(outcome.pod, template))
    yield Told(template, outcome)


def _with_pull_warning(outcome: Outcome, pod: Mapping[str, Any], settings: InjectionSettings) -> Outcome:
    """Warn of a pod that had no pull secrets: the API server gives those of the service account only to such pods.

    The webhook has no such trouble: it comes after that.
    """
    if pod["spec"].get("imagePullSecrets") or not outcome.pod["spec"].get("imagePullSecrets"):
        return outcome
    names = ", ".join(settings.pull_secrets)
    text = f"It had no imagePullSecrets, now {names}: those of its service account no longer count. Add them by hand."
    return replace(outcome, warnings=(*outcome.warnings, text))


def _runs_vllm(pod: Mapping[str, Any], outcome: Outcome) -> bool:
    """Say whether a pod without our label is one of vLLM; the only container of a pod may be anything."""
    if outcome.result is Result.INJECTED:
        return is_evident(pod["spec"], pod["metadata"].get("annotations") or {})
    return outcome.reason is not SkipReason.NO_VLLM_CONTAINER


def _as_pod(template: PodTemplate, pool_name: str) -> dict[str, Any]:
    """Return a template as the pod that will be made of it, as far as that is known."""
    pod: dict[str, Any] = plain(template.node)
    metadata = pod["metadata"] if isinstance(pod.get("metadata"), dict) else {}
    labels = metadata["labels"] if isinstance(metadata.get("labels"), dict) else {}
    pod["metadata"] = {**metadata, "labels": {**labels, POOL_NAME_LABEL: pool_name}}
    if template.namespace and "namespace" not in metadata:
        pod["metadata"]["namespace"] = template.namespace
    return pod


def _as_template(pod: Mapping[str, Any], template: PodTemplate) -> dict[str, Any]:
    had = template.node.get("metadata")
    metadata = {key: value for key, value in pod["metadata"].items() if key != "namespace" or (had and key in had)}
    annotations = {k: v for k, v in metadata.get("annotations", {}).items() if k != SKIPPED_ANNOTATION}
    return {**pod, "metadata": {**metadata, "annotations": annotations}}


def _print(manifest: Manifest, *, as_diff: bool, is_first: bool) -> None:
    text = manifest.render() if manifest.documents else manifest.text
    if as_diff:
        before, after = manifest.text.splitlines(keepends=True), text.splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(before, after, manifest.source, f"{manifest.source} with the cache"))
        return
    if not is_first and not manifest.is_json and not text.startswith("---"):
        sys.stdout.write("---\n")
    sys.stdout.write(text)


def _has_it_already(outcome: Outcome) -> str:
    version = (outcome.pod["metadata"].get("annotations") or {}).get(INJECTED_ANNOTATION)
    text = "left as it is, it has the cache already"
    if version in (None, importlib.metadata.version("py-kvcache")):
        return text
    return (
        f"{text}, by version {escape(printable(str(version)))}. To renew it remove the annotation {INJECTED_ANNOTATION}"
    )


def _tell(tellings: Iterable[Told]) -> None:
    console = stderr()
    is_any = False
    for told in tellings:
        is_any = True
        outcome = told.outcome
        text = {
            Result.INJECTED: "[green]cache added[/]",
            Result.UNCHANGED: _has_it_already(outcome),
            Result.SKIPPED: f"[yellow]no cache[/]: {escape(outcome.message)}",
            Result.REJECTED: f"[red]refused[/]: {escape(outcome.message)}",
        }[outcome.result]
        console.print(f"{escape(printable(str(told.template)))}: {text}")
        for warning in outcome.warnings:
            console.print(f"  [yellow]warning[/]: {escape(printable(warning))}")
    if not is_any:
        console.print(
            f"[yellow]nothing to do[/]: no pod template has the label {POOL_NAME_LABEL}. Set it on the template's "
            "metadata, or choose a pool by --pool"
        )
