"""litellm, tagged by headers: it knows no `extra_body` for every provider."""

import sys
from importlib.metadata import version

import litellm
from openai_answers import headers, report, said_nobody


def ask(tags, messages, model="tiny", **options):
    return litellm.completion(
        model=f"openai/{model}",
        base_url=sys.argv[1],
        api_key="none",
        messages=messages,
        extra_headers=headers(tags),
        **options,
    )


report(f"litellm {version('litellm')}", ask, said_nobody)
