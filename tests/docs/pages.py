"""The pages of the project and the commands that they show."""

import re

from tests.runs import PROJECT

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(PROJECT)) for page in PAGES]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands_of(name: str) -> list[str]:
    """Return the commands of a page, each in one line and without its comment."""
    blocks = "".join(BLOCK.findall((PROJECT / name).read_text())).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line) for line in blocks.splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip()]
