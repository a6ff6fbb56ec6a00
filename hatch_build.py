"""What hatchling asks when it builds: the README as PyPI shows it."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+://|#)([^)\s]+)\)")


def resolve_links(text: str, source: str | None) -> str:
    """The README with links that work outside the repository: to files at `source`, a tag's or branch's page
    (`https://github.com/OWNER/NAME/blob/v0.1.0`). Without it, links become plain text and pictures go."""

    def resolve(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if source is None:
            return "" if picture else words
        return f"{picture}[{words}]({source.replace('/blob/', '/raw/') if picture else source}/{target})"

    return LINK.sub(resolve, text)


class ReadmeHook(MetadataHookInterface):
    """Reads the repository's address from `Source` in `[project.urls]`, where it is filled in."""

    def update(self, metadata: dict) -> None:
        address = metadata.get("urls", {}).get("Source")
        source = f"{address.rstrip('/')}/blob/v{metadata['version']}" if address else None
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": resolve_links(text, source)}
