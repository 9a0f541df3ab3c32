"""Routing of a model's name to a version: hot swap of adapters.

A call has a lease on its version, which is unloaded only after the last such call has ended.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from langchain_art.errors import InvalidRequest, UnknownModel
from langchain_art_server.backends.base import Sampler
from langchain_art_server.policies.adapter_store import ADAPTER_FILES, Absent, AdapterStore

#: Versions that stay loaded though they do not serve: those last asked for as POLICY@VERSION.
MAX_PINNED_LOADED = 8
_VERSION = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class RoutedModel:
    """The adapter that a model's name is routed to."""

    adapter: str | None
    """The sampler's name for it; None: the base model."""
    policy: str | None
    version: int | None
    model: str
    """``model`` in the reply: ``email-agent@17``, or the base model's name."""


class Router:
    """Routes names to versions; loads versions into the sampler and unloads them.

    A version that stops serving stays loaded until the last call that was routed to it has ended:
    a hot swap neither fails a call nor changes its version.
    """

    def __init__(self, base_name: str, store: AdapterStore, sampler: Sampler) -> None:
        self.base_name = base_name
        self._store, self._sampler = store, sampler
        #: The version that a policy's bare name is routed to.
        self.serving: dict[str, int] = {}
        self._users: Counter[str] = Counter()
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._loading: dict[str, asyncio.Task[None]] = {}
        #: Awaited before a call's name is routed, as others may have published; whether there is
        #: such a name. None: there are no other servers.
        self.before_use: Callable[[str], Awaitable[bool]] | None = None
        #: Called with a policy that was removed, whichever server deleted it.
        self.on_remove: Callable[[str], None] = lambda _policy: None

    async def serve(self, policy: str, version: int) -> None:
        """`load` a version, then route the bare name to it. Unloads nothing; see `trim`."""
        await self.load(policy, version)
        self.serving[policy] = version

    async def load(self, policy: str, version: int) -> str:
        """Load a version, once for all who ask meanwhile; returns its name. Raises Damaged."""
        name = f"{policy}@{version}"
        if name not in self._loaded:
            if (task := self._loading.get(name)) is None:
                task = self._loading[name] = asyncio.create_task(self._load(policy, version))
                task.add_done_callback(lambda ended: self._load_ended(name, ended))
            await asyncio.shield(task)
        else:
            self._loaded.move_to_end(name)
        return name

    async def _load(self, policy: str, version: int) -> None:
        await self._store.off_loop(self._store.check, policy, version, ADAPTER_FILES)
        name = f"{policy}@{version}"
        await self._sampler.load_adapter(name, self._store.path(policy, version))
        self._loaded[name] = None  # whoever still waits for it

    def _load_ended(self, name: str, ended: asyncio.Task[None]) -> None:
        del self._loading[name]
        if not ended.cancelled():
            ended.exception()  # raised in whoever still waits

    def users(self, policy: str) -> int:
        """Calls that versions of a policy are answering now."""
        return sum(n for name, n in self._users.items() if name.partition("@")[0] == policy)

    async def remove(self, policy: str) -> None:
        """Route the policy's names no more, and unload its versions."""
        self.serving.pop(policy, None)
        names = {*self._loaded, *self._loading}
        await self._unload([one for one in names if one.partition("@")[0] == policy])
        self.on_remove(policy)

    async def _unload(self, names: Sequence[str]) -> None:
        for name in names:
            if (task := self._loading.get(name)) is not None:
                await asyncio.wait({task})  # else it would be there after all
            self._loaded.pop(name, None)
            await self._sampler.unload_adapter(name)

    async def forget(self, policy: str, version: int) -> None:
        """Unload a version before it is deleted. Raises InvalidRequest if calls use it."""
        name = f"{policy}@{version}"
        if self._users[name]:
            raise InvalidRequest(
                f"{name} is answering {self._users[name]} calls right now; try again when they "
                "have ended."
            )
        await self._unload([name])

    async def keep(
        self, versions: Collection[tuple[str, int]], is_changing: Callable[[str], bool]
    ) -> None:
        """Unload all but `versions`: another server deleted them. Not while they answer calls.

        `is_changing` says whether this server makes or deletes versions of a policy now.
        """
        kept = {f"{policy}@{version}" for policy, version in versions}
        kept |= {f"{policy}@{version}" for policy, version in self.serving.items()}
        for name in [n for n in self._loaded if n not in kept and not self._users[n]]:
            if not is_changing(name.partition("@")[0]):
                await self._unload([name])

    async def trim(self) -> None:
        """Unload versions that neither serve nor answer calls, but for the last used few."""
        serving = {f"{policy}@{version}" for policy, version in self.serving.items()}
        idle = [n for n in self._loaded if n not in serving and not self._users[n]]
        await self._unload(idle[: max(0, len(idle) - MAX_PINNED_LOADED)])

    @asynccontextmanager
    async def use(self, model: str) -> AsyncGenerator[RoutedModel]:
        """`resolve` a model's name, and keep the version loaded until the call has ended."""
        if self.before_use is not None and not await self.before_use(model):
            raise self._unknown(model)
        target = await self.resolve(model)
        if target.adapter is None:
            yield target
            return
        self._users[target.adapter] += 1
        try:
            yield target
        finally:
            self._users[target.adapter] -= 1
            if not self._users[target.adapter]:
                del self._users[target.adapter]
                if self.serving.get(target.policy or "") != target.version:
                    await self.trim()

    async def resolve(self, model: str) -> RoutedModel:
        """Route a name: the base model's, a policy's, or ``POLICY@VERSION``, which is loaded.

        Raises:
            UnknownModel: there is no such name; its message lists those that there are.
            Damaged: the version is to be loaded, and its files are not what was published.
        """
        if model == self.base_name:
            return RoutedModel(None, None, None, model)
        policy, at, number = model.partition("@")
        if policy in self.serving and (not at or _VERSION.fullmatch(number)):
            version = int(number) if at else self.serving[policy]
            name = f"{policy}@{version}"
            if not at:
                return RoutedModel(name, policy, version, name)
            if name in self._loaded or self._store.exists(policy, version):
                try:
                    await self.load(policy, version)
                except Absent:  # deleted meanwhile
                    raise self._unknown(model) from None
                return RoutedModel(name, policy, version, name)
        raise self._unknown(model)

    def _unknown(self, model: str) -> UnknownModel:
        known = sorted([self.base_name, *self.serving])
        return UnknownModel(
            f"got model {model[:200]!r}, expected one of {known}, or POLICY@VERSION for a version "
            'that is kept. Make a policy with POST /v1/policies {"name": …}, `Trainer.fit`, or '
            "`langchain-art serve --policy NAME`.",
            param="model",
        )
