"""Where the examples are: in a checkout of the repository, or in the installed package."""

from __future__ import annotations

from pathlib import Path

from langchain_art.errors import ConfigError

#: The demo without a name.
EMAIL = "email-search"


def examples_root() -> Path:
    """The folder that has ``examples``.

    Raises:
        ConfigError: this installation has no examples.
    """
    package = Path(__file__).parents[2]
    for root in (package.parent, package / "_examples"):
        if (root / "examples" / "support" / "demo.py").is_file():
            return root
    raise ConfigError(
        f"got an installation without the examples ({package}), expected those of the repository "
        "or of a wheel; install the package again"
    )


def example_names() -> list[str]:
    """The examples that are trained, as ``langchain-art demo NAME`` has them, sorted."""
    trained = (examples_root() / "examples").glob("*/train.py")
    return sorted(path.parent.name.replace("_", "-") for path in trained)


def find_example(name: str) -> str:
    """The package of an example below ``examples``: ``tic_tac_toe`` for ``tic-tac-toe``.

    Raises:
        ConfigError: none of them is called so.
    """
    found = example_names()
    if (known := name.replace("_", "-")) not in found:
        raise ConfigError(f"got the example {name!r}, expected one of: {', '.join(found)}")
    return known.replace("-", "_")
