"""Who may ask the gateway for what, and how often."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from cluster.config.reading.api_keys import Key, KeyRing
from serve_apps.gateway.options import AddressRange
from serve_apps.openai.errors import ApiError, unavailable
from serve_apps.quotas.tenant_limits import LimitedError, Limits, OwnLimits, PerMinute
from serve_apps.quotas.token_budget import Admission

ANYONE = "anyone"
"""The tenant of a gateway without keys."""


def credential(headers: Mapping[str, str]) -> str:
    """What a request shows as its key, as an `Authorization` header has it; empty where it shows none.

    Clients of Azure's API send `api-key`, those of Anthropic's `x-api-key`.
    """
    given = headers.get("authorization", "")
    key = headers.get("api-key") or headers.get("x-api-key")
    return given or (f"Bearer {key}" if key else "")


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    tenant: str = ANYONE
    key: Key | None = None
    sees_all: bool = True
    """Whether the caller may know of all apps; else of those that the key opens, if there is one."""

    def sees(self, app: str) -> bool:
        """Whether the caller may know of an app."""
        return self.sees_all or (self.key is not None and self.key.opens(app))


class Access:
    """Checks keys and limits; without keys everyone may ask for everything.

    Limits hold for each tenant.

    Args:
        admin_token: opens what only those may see who run the cluster.
        metrics_from: where figures that tell of all apps may be read from without a key.
        limits: counts what tenants ask for. Default: here alone.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        admin_token: str | None = None,
        metrics_from: Collection[AddressRange] = (),
        limits: Limits | None = None,
    ) -> None:
        self.keys = keys
        """None: the gateway needs no keys."""
        self.waits_for_keys = False
        """Which there are is not known yet: nobody can be told that a key is wrong."""
        self._admin_token = admin_token
        self._metrics_from = metrics_from
        self._limits = limits or OwnLimits()

    def caller(self, authorization: str) -> Caller:
        """Who an `Authorization` header belongs to.

        Raises:
            ApiError: 401; 503 while no key is known yet.
        """
        if self.keys is None:
            return Caller()
        key = self.keys.find(authorization)
        if key is None and self.waits_for_keys:
            raise unavailable("The API keys are not known yet; try again in a moment.")
        if key is None:
            what = "The API key is not valid" if authorization else "An API key is needed"
            raise _no_key(f"{what}; send it as 'Authorization: Bearer KEY'.")
        return Caller(key.tenant, key, sees_all=False)

    def anyone(self, authorization: str) -> Caller:
        """Who an `Authorization` header belongs to, for what nobody is kept from: who shows no key that is
        known may know of no app."""
        if self.keys is None or self._is_admin(authorization):
            return Caller()
        key = self.keys.find(authorization)
        return Caller(sees_all=False) if key is None else Caller(key.tenant, key, sees_all=False)

    def admin(self, authorization: str) -> None:
        """Let in who runs the cluster: the bearer of the cluster's own token.

        Raises:
            ApiError: 401; never without keys, since then only this machine can ask.
        """
        if self.keys is not None and not self._is_admin(authorization):
            raise _no_key("Only the cluster's own token opens this.")

    def observer(self, authorization: str, address: str | None, *, direct: bool = False) -> None:
        """Let in who may read figures that tell of all apps: by a key that is marked for it, by the cluster's
        own token, or from an address that the config names.

        Args:
            address: the other end of the connection; None: not known.
            direct: there is a front, and this did not come through it.

        Raises:
            ApiError: 401, or 403 where the key is known; without keys only where it is direct.
        """
        is_open = self.keys is None and not direct
        if is_open or self._is_admin(authorization) or self._may_observe(address):
            return
        key = self.keys.find(authorization) if self.keys is not None else None
        if key is None:
            raise _no_key(
                "This needs a key that is marked for it (`metrics: true`; `shoal key TENANT --metrics`), or"
                " an address that cluster.gateway.metrics_from names."
            )
        if not key.metrics:
            raise ApiError(
                403,
                "This API key is not marked for it: its entry in the key file needs `metrics: true`.",
                code="key_without_metrics",
            )

    def _is_admin(self, authorization: str) -> bool:
        expected = f"Bearer {self._admin_token}"
        known = hmac.compare_digest(authorization.encode(), expected.encode())
        return known and self._admin_token is not None

    def _may_observe(self, address: str | None) -> bool:
        if not self._metrics_from or address is None:
            return False
        try:
            parsed: IPv4Address | IPv6Address = ip_address(address)
        except ValueError:
            return False  # a test's client, or a socket that has no address
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._metrics_from)

    async def admit(self, caller: Caller, expected: Callable[[], int]) -> Admission:
        """Count one request of a caller, and keep room for the tokens that it may take.

        Args:
            expected: reckons about how many it may take; asked only where tokens are limited.

        Raises:
            ApiError: 429, the tenant has asked too much.
        """
        key = caller.key
        if key is None:
            return Admission()
        limits = PerMinute(key.requests_per_minute, key.tokens_per_minute)
        try:
            return await self._limits.admit(caller.tenant, limits, expected)
        except LimitedError as error:
            raise _refusal(caller, error) from None


def _no_key(message: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def _refusal(caller: Caller, limited: LimitedError) -> ApiError:
    return ApiError(
        429,
        f"{caller.tenant} may ask for {limited}.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(limited.wait_s)},
    )
