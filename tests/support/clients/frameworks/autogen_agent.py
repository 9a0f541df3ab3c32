"""AutoGen: tools with a reflection on their result, a JSON schema, a streamed run."""

import asyncio

from agent_report import PERSON, SUM, Person, add, report, streamed
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient


def agent(base_url, run, **options):
    model = OpenAIChatCompletionClient(
        model="tiny",
        base_url=base_url,
        api_key="none",
        default_headers={"x-art-trajectory-id": run, "x-art-node": "agent"},
        model_info={
            "family": ModelFamily.UNKNOWN,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "vision": False,
        },
    )
    return AssistantAgent("helper", model, system_message=None, **options)


def answer(base_url, run, question, tools):
    one = agent(base_url, run, tools=tools, reflect_on_tool_use=True)
    return asyncio.run(one.run(task=question)).messages[-1].content


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
