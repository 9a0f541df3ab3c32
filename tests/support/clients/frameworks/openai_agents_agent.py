"""OpenAI's Agents SDK: tools, a JSON schema by `output_type`, a streamed run."""

import asyncio

import agents
from agent_report import PERSON, SUM, Person, add, report, streamed
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent


def agent(base_url, run, tools=(), **options):
    agents.set_tracing_disabled(True)  # traces would go to OpenAI
    headers = {"x-art-trajectory-id": run, "x-art-node": "agent"}
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    return agents.Agent(
        name="helper",
        model=agents.OpenAIChatCompletionsModel(model="tiny", openai_client=client),
        model_settings=agents.ModelSettings(extra_headers=headers),
        tools=[agents.function_tool(tool) for tool in tools],
        **options,
    )


def answer(base_url, run, question, tools):
    return agents.Runner.run_sync(agent(base_url, run, tools), question).final_output


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
