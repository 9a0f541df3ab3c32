"""Haystack: tools, a JSON schema by `response_format`, a streamed run."""

import json

from agent_report import PERSON, SUM, Person, add, report, streamed
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret


def model(base_url, run, **options):
    headers = {"x-art-trajectory-id": run, "x-art-node": "agent"}
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model="tiny",
        api_base_url=base_url,
        generation_kwargs={"extra_headers": headers, **options},
    )


def answer(base_url, run, question, tools, **options):
    tools = [create_tool_from_function(tool) for tool in tools]
    agent = Agent(chat_generator=model(base_url, run), tools=tools, **options)
    return agent.run([ChatMessage.from_user(question)])["last_message"].text


def schema(base_url, run):
    replies = model(base_url, run, response_format=Person).run([ChatMessage.from_user(PERSON)])
    return json.loads(replies["replies"][0].text)


def stream(base_url, run):
    pieces = []
    answer(base_url, run, SUM, [add], streaming_callback=lambda one: pieces.append(one.content))
    return streamed(pieces)


report("haystack-ai", answer, schema, stream)
