"""Haystack: a JSON schema by `response_format`, a streamed run."""

import json

from agent_report import PERSON, SUM, Person, add, report, streamed
from haystack.dataclasses import ChatMessage
from shown import answer, model


def schema(base_url, run):
    replies = model(base_url, run, response_format=Person).run([ChatMessage.from_user(PERSON)])
    return json.loads(replies["replies"][0].text)


def stream(base_url, run):
    pieces = []
    answer(base_url, run, SUM, [add], streaming_callback=lambda one: pieces.append(one.content))
    return streamed(pieces)


report("haystack-ai", answer, schema, stream)
