"""Output in a notebook: values as HTML, and lines that are redrawn in their cell."""

from __future__ import annotations

import io
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Lines of text that a cell shows at most; older ones are counted.
_MOST_LINES = 40
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;margin:0;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,monospace\">{code}</pre>"
)


def view_html(view: str, value: Any) -> str:
    """A value as HTML: escaped, and drawn by the view that the command line prints it with.

    Args:
        view: ``module:function`` below this package. By name, since views stand above the values
            that they show, which load neither them nor rich.
        value: what the function takes.
    """
    module, _, name = view.partition(":")
    return as_html(getattr(import_module(f"langchain_art.{module}"), name)(value))


def as_html(shown: RenderableType) -> str:
    """Render for rich as HTML, with colours."""
    from rich.console import Console  # noqa: PLC0415 - values are imported without it

    console = Console(
        file=io.StringIO(),
        record=True,
        width=100,
        color_system="truecolor",
        no_color=False,
        force_jupyter=False,
    )
    console.print(shown)
    html = console.export_html(code_format=_HTML, inline_styles=True)
    return "\n".join(line.rstrip() for line in html.splitlines())


class Cell:
    """Output of one execution of a notebook's cell: its lines, redrawn in place with each."""

    def __init__(self) -> None:
        self._shell: Any = import_module("IPython").get_ipython()
        self._execution = self._shell.execution_count
        self._lines: list[RenderableType] = []
        self._handle: Any = None
        self._lock = Lock()  # two threads draw; what is shown last has all lines

    @property
    def over(self) -> bool:
        """True if another cell is executed by now."""
        return self._shell.execution_count != self._execution

    def add(self, line: RenderableType) -> None:
        """Show a line, or a table, below all others."""
        self._lines.append(line)
        self.draw()

    def draw(self, below: RenderableType | None = None) -> None:
        """Show the newest lines, and below them what changes."""
        from rich.console import Group  # noqa: PLC0415 - as above
        from rich.text import Text  # noqa: PLC0415

        display: Any = import_module("IPython.display")
        last = [] if below is None else [below]
        with self._lock:
            older = len(self._lines) - _MOST_LINES
            above = [Text(f"… {older} lines before these", "dim")] if older > 0 else []
            html = display.HTML(as_html(Group(*above, *self._lines[-_MOST_LINES:], *last)))
            if self._handle is None:
                self._handle = display.display(html, display_id=True)
            else:
                self._handle.update(html)
