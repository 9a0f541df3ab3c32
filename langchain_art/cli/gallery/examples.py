"""The examples of the repository, as the command line finds them."""

from __future__ import annotations

from pathlib import Path

from langchain_art.errors import ConfigError

#: The demo without a name.
EMAIL = "email-search"


def find_example(name: str) -> str:
    """The package of an example below ``examples``: ``tic_tac_toe`` for ``tic-tac-toe``.

    Raises:
        ConfigError: there are no examples in this directory, or none of them is called so.
    """
    found = sorted(path.parent.name for path in Path("examples").glob("*/train.py"))
    if not found:
        raise ConfigError(
            "The demo is examples/email_search, which is part of the repository and not of the "
            "installed package. Clone the repository, install it with "
            '`pip install -e ".[local,examples]"`, and run `langchain-art demo` in its root.'
        )
    if (package := name.replace("-", "_")) not in found:
        names = ", ".join(one.replace("_", "-") for one in found)
        raise ConfigError(f"got the example {name!r}, expected one of: {names}")
    return package
