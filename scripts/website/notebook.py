"""A notebook as a Markdown page: its text, its code and what the code printed."""

import json
import re
from pathlib import Path

BADGE = re.compile(r"!\[([^\]]*)\]\(https?://[^)]*\)")  # a picture from elsewhere, which the site doesn't load


def markdown(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(BADGE.sub(r"\1", source))
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def shown(output: dict) -> str:
    """An output as a block of text or as a picture."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    if output["output_type"] == "error":
        return f"```text\n{output['ename']}: {output['evalue']}\n```"
    data = output["data"]
    if "image/svg+xml" in data:
        return "".join(data["image/svg+xml"])
    if "image/png" in data:
        return f'<img alt="output" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return f"```text\n{''.join(data['text/plain'])}\n```"
