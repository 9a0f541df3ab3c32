"""The operations of a server's administrator: API keys, and the log of who did what."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_art.client.endpoint import Address, endpoint
from langchain_art.client.http_request import Flow, Request
from langchain_art.client.routes import many, pages, path_of
from langchain_art.wire import ApiKey, KeyLimits, KeySpec, LoggedAction, NewApiKey, Scope
from langchain_art.wire.api_keys import DEFAULT_TENANT


class KeyEndpoints(Address):
    """Makes, lists and revokes API keys. All need the server's own key."""

    @endpoint
    def create_key(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        scopes: Sequence[Scope] = ("infer", "submit", "review"),
        limits: KeyLimits | None = None,
        expires_at: float | None = None,
    ) -> Request[NewApiKey]:
        """Make a key; the answer alone has the key itself.

        Args:
            name: for people: whose it is, or what for.
            tenant: whose runs, policies, calls and jobs it reaches; a new name is a new tenant.
            scopes: what it may do.
            limits: how much. None: no limits but the server's own.
            expires_at: seconds since the epoch from which on it is refused. None: never.

        Raises:
            ConfigError: a value is not valid.
            PermissionDenied: this client's key is not the administrator's.
        """
        spec = KeySpec(
            name=name,
            tenant=tenant,
            scopes=tuple(scopes),
            limits=limits or KeyLimits(),
            expires_at=expires_at,
        )
        return Request("POST", "/v1/keys", NewApiKey.model_validate_json, body=spec)

    @endpoint
    def api_keys(self) -> Request[list[ApiKey]]:
        """All keys that were ever made, oldest first, without the keys themselves."""
        return Request("GET", "/v1/keys", many(ApiKey))

    @endpoint
    def revoke_key(self, key_id: str) -> Request[ApiKey]:
        """Revoke a key from now on. Raises NotFound."""
        return Request("DELETE", path_of("keys", key_id), ApiKey.model_validate_json)

    @endpoint
    def actions(self, limit: int | None = 100) -> Flow[list[LoggedAction]]:
        """List who trained, rolled back, deleted, reviewed, made and revoked keys: newest first.

        Args:
            limit: the most that are wanted. None: all.
        """
        return pages("/v1/log", LoggedAction, {}, limit)
