"""AutoGen: a JSON schema, a streamed run."""

import asyncio

from agent_report import PERSON, SUM, Person, add, report, streamed
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from shown import agent, answer


def schema(base_url, run):
    one = agent(base_url, run, output_content_type=Person)
    return asyncio.run(one.run(task=PERSON)).messages[-1].content.model_dump()


def stream(base_url, run):
    one = agent(base_url, run, tools=[add], reflect_on_tool_use=True, model_client_stream=True)

    async def pieces():
        return [
            event.content
            async for event in one.run_stream(task=SUM)
            if isinstance(event, ModelClientStreamingChunkEvent)
        ]

    return streamed(asyncio.run(pieces()))


report("autogen-agentchat", answer, schema, stream)
