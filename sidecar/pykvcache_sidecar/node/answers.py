"""What the node agent answers over HTTP: /metrics, /healthz, /readyz, /status. All from memory; any thread.

Healthy means that the loop over all pools comes round; a disk that hangs is the state of its pools and no reason to
restart. Ready means that pods can get volumes: kubelet knows the driver, and the API server has told which pools exist.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from pykvcache_contract.api.fields import to_dict
from pykvcache_contract.api.node import AgentStatus
from pykvcache_sidecar.node.exporter import NodeCollector, NodeNow, PoolNow, merged
from pykvcache_sidecar.server import TEXT, TICK_SECONDS_MAX, Answer, Answers, as_json, unavailable


@dataclass(frozen=True, slots=True)
class Views:
    """Where the answers come from.

    Args:
        now: everything that is counted and measured.
        status: what is written into the KVCacheNode.
        tick_age_seconds: since the loop over all pools came round.
        trouble: why pods get no volumes; empty if they do.
    """

    now: Callable[[], NodeNow]
    status: Callable[[], AgentStatus]
    tick_age_seconds: Callable[[], float]
    trouble: Callable[[], str]


class NodeAnswers(Answers):
    """What each path answers about the node."""

    def __init__(self, views: Views) -> None:
        super().__init__(NodeCollector(views.now))
        self._views = views

    def _healthz(self) -> Answer:
        age = self._views.tick_age_seconds()
        if age <= TICK_SECONDS_MAX:
            return HTTPStatus.OK, TEXT, b"ok\n"
        return unavailable(f"the pools were not looked at for {age:.0f} s")

    def _readyz(self) -> Answer:
        trouble = self._views.trouble()
        return unavailable(trouble) if trouble else (HTTPStatus.OK, TEXT, b"ready\n")

    def _status(self) -> Answer:
        now = self._views.now()
        return as_json(
            {
                **to_dict(self._views.status()),
                "trouble": self._views.trouble(),
                "care": {pool.report.name: _care(pool) for pool in now.pools},
            }
        )


def _care(pool: PoolNow) -> dict[str, Any]:
    """Return what the care of a pool's directories tells, for people."""
    directories = {
        now.pool: {
            "state": now.state,
            "reason": "; ".join(filter(None, (now.reason, now.last_error))),
            **asdict(now.levels),
            "blocks": sum(row.blocks for row in now.fingerprints),
        }
        for now in pool.directories
    }
    return {"state": merged(pool.directories).state, "directories": directories, "problems": pool.problems}
