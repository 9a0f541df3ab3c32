"""``python claude_agent.py PROMPT``: one query of the Claude Agent SDK; writes its result."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def main(prompt: str) -> None:
    options = ClaudeAgentOptions(allowed_tools=["Bash"])
    async for message in query(prompt=prompt, options=options):
        if isinstance(message, ResultMessage):
            assert not message.is_error, message
            print(message.result)


asyncio.run(main(sys.argv[1]))
