"""The notebooks as pages of the site, with their stored outputs. Needs nothing of MkDocs."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent


def notebook(path: Path, repository: str | None) -> str:
    """The page of a notebook: texts, code and stored outputs, and links below its title.

    Args:
        path: of the notebook, below docs/.
        repository: ``owner/name`` at GitHub, from which Colab opens it (`extra` in mkdocs.yml).
            None: there is no such link.
    """
    first, *cells = json.loads(path.read_text())["cells"]
    links = [f'<a href="{path.name}" download>Download the notebook</a>']
    if repository is not None:
        place = f"{repository}/blob/main/{path.relative_to(REPO)}"
        links.append(f"[Open in Colab](https://colab.research.google.com/github/{place})")
    title, _, text = "".join(first["source"]).partition("\n")
    parts = [title, " · ".join(links), text]
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        shown = "\n".join(map(cell_output, cell.get("outputs", ())))
        parts += [f'<div class="output">\n{shown}\n</div>'] if shown else []
    return "\n\n".join(parts)


def cell_output(output: dict[str, Any]) -> str:
    """An output of a cell as HTML: an image, what is HTML itself, or text."""
    data = output.get("data", {})
    if image := data.get("image/png"):
        return f'<img alt="Figure" src="data:image/png;base64,{"".join(image).strip()}">'
    if "text/html" in data:
        return "".join(data["text/html"])
    return f"<pre>{html.escape(''.join(output.get('text') or data['text/plain']))}</pre>"
