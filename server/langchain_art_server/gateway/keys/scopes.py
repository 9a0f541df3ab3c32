"""Scopes that each route needs: the one table of it. A route that is not in it does not start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import BaseRoute, Mount, Route

ADMINISTRATOR = "administrator"
"""Pseudo-scope of ``ART_API_KEY``, or of a key of its tenant with the scope ``admin``."""
_ANY = ("infer", "submit", "review")
_READ = ("submit", "review")
_PARAMETER = re.compile(r"\{[^}]*\}")


class ModelName(PathConvertor):
    """A model's name in a path, with slashes (ORG/NAME), but not at its end: that is redirected."""

    regex = ".*[^/]"


register_url_convertor("model", ModelName())
#: Templates whose parameter is a `ModelName`.
_OF_MODELS = {"/v1/models/{name}"}


@dataclass(frozen=True)
class Rule:
    """Rule of a route: a key with one of `scopes`; ``admin`` may use all but the keys'."""

    scopes: tuple[str, ...]
    stores: bool = False
    """True if it adds to what is stored, so that a key's `stored_bytes` holds for it."""
    waits: bool = False
    """True if an answer takes as long as it has to: of a call, a change, or a reader."""

    @cached_property
    def allowed(self) -> frozenset[str]:
        """The scopes of which one is needed."""
        return frozenset(self.scopes) | (frozenset() if ADMINISTRATOR in self.scopes else {"admin"})


#: Without a key, and so without a scope: the health checks, and what a browser needs to log in.
OPEN = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/"),
    ("GET", "/page/session"),
    ("POST", "/page/login"),
    ("POST", "/page/logout"),
}
RULES: dict[tuple[str, str], Rule] = {
    ("POST", "/v1/chat/completions"): Rule(("infer",), stores=True, waits=True),
    ("POST", "/v1/responses"): Rule(("infer",), stores=True, waits=True),
    ("POST", "/v1/messages"): Rule(("infer",), stores=True, waits=True),
    ("POST", "/v1/messages/count_tokens"): Rule(("infer",), waits=True),
    ("GET", "/v1/models"): Rule(_ANY),
    ("GET", "/v1/models/{name}"): Rule(_ANY),
    ("GET", "/status"): Rule(_ANY),
    ("GET", "/openapi.json"): Rule(_ANY),
    ("GET", "/metrics"): Rule(("metrics",)),
    ("GET", "/v1/calls/{call_id}"): Rule(_READ),
    ("POST", "/v1/policies"): Rule(("submit",), stores=True),
    ("GET", "/v1/policies"): Rule(_READ),
    ("GET", "/v1/policies/{name}"): Rule(_READ),
    ("DELETE", "/v1/policies/{name}"): Rule(("admin",)),
    ("GET", "/v1/policies/{name}/checkpoints"): Rule(_READ),
    ("PUT", "/v1/policies/{name}/checkpoints/{version}/pin"): Rule(("submit",)),
    ("DELETE", "/v1/policies/{name}/checkpoints/{version}/pin"): Rule(("submit",)),
    ("DELETE", "/v1/policies/{name}/checkpoints/{version}"): Rule(("admin",)),
    ("POST", "/v1/policies/{name}/rollback"): Rule(("submit",)),
    ("GET", "/v1/policies/{name}/checkpoints/{version}/adapter"): Rule(("submit",), waits=True),
    ("POST", "/v1/trajectories"): Rule(("submit",), stores=True),
    ("POST", "/v1/groups"): Rule(("submit",), stores=True),
    ("GET", "/v1/trajectories"): Rule(_READ),
    ("GET", "/v1/trajectories/{trajectory_id}"): Rule(_READ),
    ("DELETE", "/v1/trajectories/{trajectory_id}"): Rule(("admin",)),
    ("GET", "/v1/trajectories/{trajectory_id}/audit"): Rule(_READ),
    ("PUT", "/v1/trajectories/{trajectory_id}/reward"): Rule(("submit",)),
    ("POST", "/v1/rollouts"): Rule(("submit",), stores=True),
    ("POST", "/v1/rollouts/lease"): Rule(("submit",), waits=True),
    ("POST", "/v1/rollouts/heartbeat"): Rule(("submit",)),
    ("POST", "/v1/rollouts/return"): Rule(("submit",)),
    ("POST", "/v1/rollouts/{rollout_id}/complete"): Rule(("submit",), stores=True),
    ("GET", "/v1/rollouts/batches/{batch}"): Rule(_READ),
    ("POST", "/v1/rollouts/batches/{batch}/take"): Rule(("submit",), waits=True),
    ("DELETE", "/v1/rollouts/batches/{batch}"): Rule(("submit",)),
    ("PUT", "/v1/reviews"): Rule(("review",), stores=True),
    ("GET", "/v1/reviews"): Rule(_READ),
    ("POST", "/v1/reviews/plan"): Rule(_READ),
    ("POST", "/v1/reviews/foresee"): Rule(_READ),
    ("POST", "/v1/reviews/train"): Rule(("submit",), stores=True),
    ("POST", "/v1/train"): Rule(("submit",), stores=True),
    ("GET", "/v1/jobs"): Rule(_READ),
    ("GET", "/v1/jobs/{job_id}"): Rule(_READ, waits=True),
    ("POST", "/v1/jobs/{job_id}/cancel"): Rule(("submit",)),
    ("GET", "/v1/jobs/{job_id}/events"): Rule(_READ, waits=True),
    ("POST", "/v1/keys"): Rule((ADMINISTRATOR,)),
    ("GET", "/v1/keys"): Rule((ADMINISTRATOR,)),
    ("DELETE", "/v1/keys/{key_id}"): Rule((ADMINISTRATOR,)),
    ("GET", "/v1/log"): Rule((ADMINISTRATOR,)),
    # What the page reads; it changes things by the routes above.
    ("GET", "/page/overview"): Rule(_READ),
    ("GET", "/page/evaluations"): Rule(_READ),
    ("GET", "/page/comparison"): Rule(_READ),
    ("GET", "/page/blind"): Rule(_READ),
    ("GET", "/page/events"): Rule(_READ, waits=True),
    ("GET", "/page/jobs"): Rule(_READ),
    ("GET", "/page/jobs/{job_id}"): Rule(_READ),
    ("GET", "/page/runs"): Rule(_READ),
    ("GET", "/page/open-runs"): Rule(_READ),
    ("GET", "/page/run-names"): Rule(_READ),
    ("GET", "/page/runs/{trajectory_id}"): Rule(_READ),
    ("GET", "/page/runs/{trajectory_id}/siblings"): Rule(_READ),
    ("GET", "/page/runs/{trajectory_id}/credit/{job_id}"): Rule(_READ),
    ("GET", "/page/calls/{call_id}/tokens"): Rule(_READ),
    ("GET", "/page/images/{sha256}"): Rule(_READ),
    ("GET", "/page/review-queue"): Rule(_READ),
    ("POST", "/page/review-effect"): Rule(_READ),
}


_PLAIN = {route: rule for route, rule in RULES.items() if "{" not in route[1]}


def _pattern(template: str) -> re.Pattern[str]:
    value = ModelName.regex if template in _OF_MODELS else "[^/]+"
    return re.compile(value.join(map(re.escape, _PARAMETER.split(template))))


_PATTERNS = [
    (method, _pattern(template), rule, template)
    for (method, template), rule in RULES.items()
    if "{" in template
]
_PATHS = {template for _, template in RULES.keys() | OPEN if "{" not in template}


def is_path(path: str) -> bool:
    """True if there is a route of this path, of whatever method; with a slash it is redirected.

    Starlette's own patterns also take a path with a line feed at its end.
    """
    path = path.rstrip("/")
    return not path or bool(template_of(path))


def template_of(path: str) -> str:
    """The template of a path, of whatever method; empty if there is none."""
    if path in _PATHS:
        return path
    for _, pattern, _, template in _PATTERNS:
        if pattern.fullmatch(path):
            return template
    return ""


def rule_of(method: str, path: str) -> Rule | None:
    """The rule of a request; None: there is no such route, or none of this method."""
    if method == "HEAD":
        method = "GET"
    if (rule := _PLAIN.get((method, path))) is not None:
        return rule
    for of, pattern, rule, _ in _PATTERNS:
        if of == method and pattern.fullmatch(path):
            return rule
    return None


def routes_of(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and template of every route of an application, but for mounted files."""
    for route in routes:
        if isinstance(route, Route):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield method, route.path_format
        elif not isinstance(route, Mount):
            # A router that FastAPI has included as a whole.
            yield from routes_of(cast(Any, route).original_router.routes)


def require_rules(routes: Iterable[BaseRoute]) -> None:
    """Raises LookupError if a route has no rule: it would be open to every key."""
    if missing := sorted(set(routes_of(routes)) - RULES.keys() - OPEN):
        raise LookupError(f"got routes without a rule in gateway.keys.scopes: {missing}")
