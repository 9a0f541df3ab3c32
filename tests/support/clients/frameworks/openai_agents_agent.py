"""OpenAI's Agents SDK: a JSON schema by `output_type`, a streamed run."""

import asyncio

import agents
from agent_report import PERSON, SUM, Person, add, report, streamed
from openai.types.responses import ResponseTextDeltaEvent
from shown import agent, answer


def schema(base_url, run):
    one = agent(base_url, run, output_type=Person)
    return agents.Runner.run_sync(one, PERSON).final_output.model_dump()


def stream(base_url, run):
    async def pieces():
        running = agents.Runner.run_streamed(agent(base_url, run, [add]), SUM)
        return [
            event.data.delta
            async for event in running.stream_events()
            if isinstance(getattr(event, "data", None), ResponseTextDeltaEvent)
        ]

    return streamed(asyncio.run(pieces()))


report("openai-agents", answer, schema, stream)
