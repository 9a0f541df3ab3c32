"""pydantic-ai: tools, a JSON schema by `NativeOutput`, a streamed run."""

from agent_report import PERSON, SUM, Person, add, report, streamed
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(base_url, run, **options):
    headers = {"x-art-trajectory-id": run, "x-art-node": "agent"}
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    return Agent(model, model_settings={"extra_headers": headers}, **options)


def answer(base_url, run, question, tools):
    return agent(base_url, run, tools=tools).run_sync(question).output


def schema(base_url, run):
    one = agent(base_url, run, output_type=NativeOutput(Person))
    return one.run_sync(PERSON).output.model_dump()


def stream(base_url, run):
    with agent(base_url, run, tools=[add]).run_stream_sync(SUM) as result:
        return streamed(result.stream_text(delta=True, debounce_by=None))


report("pydantic-ai-slim", answer, schema, stream)
