"""LlamaIndex: a JSON schema by `as_structured_llm`, a streamed run."""

import asyncio

from agent_report import PERSON, SUM, Person, add, report, streamed
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from shown import answer, model


def schema(base_url, run):
    one = model(base_url, run, should_use_structured_outputs=True).as_structured_llm(Person)
    return one.complete(PERSON).raw.model_dump()


def stream(base_url, run):
    async def pieces():
        running = FunctionAgent(tools=[add], llm=model(base_url, run)).run(SUM)
        events = [event async for event in running.stream_events()]
        await running
        return [event.delta for event in events if isinstance(event, AgentStream)]

    return streamed(asyncio.run(pieces()))


report("llama-index-core", answer, schema, stream)
