"""A middleware of the examples' agents: a run that calls the model too often ends quietly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage


class CallCap(AgentMiddleware):
    """Ends a run quietly: beyond the cap an empty message stands for the model's turn.

    It wraps the model call and adds no node to the graph; `ModelCallLimitMiddleware` adds two.
    """

    def __init__(self, max_calls: int) -> None:
        """Allow at most `max_calls` calls of the model in one run."""
        super().__init__()
        self._max_calls = max_calls

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse | AIMessage:
        """Call the model, or end the run when it has been called often enough."""
        if sum(isinstance(message, AIMessage) for message in request.messages) >= self._max_calls:
            return AIMessage("")
        return await handler(request)
