"""LlamaIndex: tools, a JSON schema by `as_structured_llm`, a streamed run."""

import asyncio

from agent_report import PERSON, SUM, Person, add, report, streamed
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def model(base_url, run, **options):
    return OpenAILike(
        "tiny",
        api_base=base_url,
        api_key="none",
        default_headers={"x-art-trajectory-id": run, "x-art-node": "agent"},
        temperature=1.0,  # by default it sends 0.1
        is_chat_model=True,
        is_function_calling_model=True,
        **options,
    )


def answer(base_url, run, question, tools):
    async def ask():
        agent = FunctionAgent(tools=tools, llm=model(base_url, run), streaming=False)
        return (await agent.run(question)).response.content

    return asyncio.run(ask())


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
