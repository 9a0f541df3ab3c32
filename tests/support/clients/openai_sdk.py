"""The OpenAI SDK for Python, 2.x or 3.x."""

import sys

import openai
from openai_answers import report

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")


def ask(tags, messages, model="tiny", **options):
    return client.chat.completions.create(
        model=model, messages=messages, extra_body={"art": tags}, **options
    )


report(f"openai {openai.__version__}", ask)
