"""CrewAI: a JSON schema by `response_format`, a streamed run."""

from agent_report import PERSON, SUM, Person, add, report
from crewai.events import LLMStreamChunkEvent, crewai_event_bus
from shown import agent, answer


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
