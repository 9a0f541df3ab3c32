"""CrewAI: tools, a JSON schema by `response_format`, a streamed run."""

from agent_report import PERSON, SUM, Person, add, report
from crewai import LLM, Agent
from crewai.events import LLMStreamChunkEvent, crewai_event_bus
from crewai.tools import tool


def agent(base_url, run, tools=(), **options):
    headers = {"x-art-trajectory-id": run, "x-art-node": "agent"}
    model = LLM(
        "tiny",
        provider="openai",
        base_url=base_url,
        api_key="none",
        default_headers=headers,
        **options,
    )
    tools = [tool(one) for one in tools]
    return Agent(role="helper", goal="Help.", backstory="Brief.", llm=model, tools=tools)


def answer(base_url, run, question, tools):
    return agent(base_url, run, tools).kickoff(question).raw


def schema(base_url, run):
    return agent(base_url, run).kickoff(PERSON, response_format=Person).pydantic.model_dump()


def stream(base_url, run):
    pieces = []
    with crewai_event_bus.scoped_handlers():
        crewai_event_bus.on(LLMStreamChunkEvent)(lambda _, event: pieces.append(event))
        said = agent(base_url, run, [add], stream=True).kickoff(SUM).raw
        crewai_event_bus.flush()
    return [said, len([one for one in pieces if one.tool_call is None]) > 1]


report("crewai", answer, schema, stream)
