"""Every route has a rule, or the server does not start; what no route is has none."""

import pytest
from fastapi import APIRouter, FastAPI

from langchain_art_server.gateway.keys.scopes import (
    OPEN,
    RULES,
    is_path,
    require_rules,
    routes_of,
    rule_of,
    template_of,
)


def test_a_route_without_a_rule_is_not_served() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)
    require_rules(app.routes)
    router = APIRouter(prefix="/page")

    @router.get("/secrets")
    def secrets() -> None: ...

    app.include_router(router)
    assert ("GET", "/page/secrets") in set(routes_of(app.routes))
    with pytest.raises(LookupError, match="/page/secrets"):
        require_rules(app.routes)


def test_each_route_is_found_by_its_own_rule() -> None:
    for (method, template), rule in RULES.items():
        path = template
        for name in ("name", "version", "call_id", "trajectory_id", "job_id", "key_id"):
            path = path.replace(f"{{{name}}}", "pin")  # which is also a part of a path
        assert rule_of(method, path) is rule, (method, template)
        assert is_path(path) and is_path(f"{path}/")
        assert rule_of("PATCH", path) is None
    assert all(is_path(path) for _, path in OPEN)


def test_a_models_name_may_have_slashes_and_no_other() -> None:
    template = "/v1/models/{name}"
    for path in ("/v1/models/base", "/v1/models/org/base", "/v1/models//srv/base"):
        assert rule_of("GET", path) is RULES["GET", template] and template_of(path) == template
    for path in ("/v1/models/", "/v1/models/base/", "/v1/policies/org/base"):
        assert rule_of("GET", path) is None


@pytest.mark.parametrize("path", ["/v1/keys\n", "/v1", "/v1/keys/a/b", "//v1/keys", "/v1/KEYS", ""])
def test_another_path_has_no_rule(path: str) -> None:
    assert rule_of("GET", path) is None
    assert is_path(path) == (path == "")
