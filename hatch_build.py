"""The package's description for an index: README.md, its relative links made absolute."""
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A Markdown link to a file of the repository: no scheme, and no place within the page.
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def absolute(text, source):
    """`text` with each relative link below `source`, the repository's address. Pictures get the file itself, not its page."""
    return RELATIVE.sub(lambda m: f"{m[1]}[{m[2]}]({source}/{'raw' if m[1] else 'blob'}/main/{m[3]})", text)


class CustomMetadataHook(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml declares dynamic."""

    def update(self, metadata):
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, metadata["urls"]["Source"])}
