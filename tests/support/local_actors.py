"""Places of a cluster in this process, each with an engine's process of its own."""

from typing import Any

from langchain_art.ray.placed_actors import ActorsUnavailable
from langchain_art_server.backends.ray.engines import EngineHost


class LocalActors:
    """A `PlacedActors` whose actors are in this process; `missing` says why there is no room."""

    missing = ""

    def __init__(
        self,
        what: str,
        actor: type[EngineHost] = EngineHost,
        needs: dict[str, float] | None = None,
        actors: int = 1,
    ) -> None:
        self.problem: str | None = None
        self.hosts, self.closed = [actor() for _ in range(actors)], False

    def wait(self, seconds: float) -> None:
        self.problem = self.missing or None
        if self.missing:
            raise ActorsUnavailable(self.missing)

    def call(self, method: str, *arguments: Any, seconds: float, actor: int = 0) -> Any:
        return getattr(self.hosts[actor], method)(*arguments)

    def close(self) -> None:
        self.closed = True
