"""pydantic-ai: a JSON schema by `NativeOutput`, a streamed run."""

from agent_report import PERSON, SUM, Person, add, report, streamed
from pydantic_ai import NativeOutput
from shown import agent, answer


def schema(base_url, run):
    one = agent(base_url, run, output_type=NativeOutput(Person))
    return one.run_sync(PERSON).output.model_dump()


def stream(base_url, run):
    with agent(base_url, run, tools=[add]).run_stream_sync(SUM) as result:
        return streamed(result.stream_text(delta=True, debounce_by=None))


report("pydantic-ai-slim", answer, schema, stream)
