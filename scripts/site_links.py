"""For mkdocs: README.md is the start page, and links to files outside docs/ go to the repository."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
TARGET = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+(?=[)#])")
"""Of a link or an image, without the section: a path."""


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as a page, as if it stood in docs/."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    text = TARGET.sub(lambda path: f"../{path[0]}", readme).replace("](../docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """`../scripts/x.py` becomes its address in the repository.

    Raises:
        PluginError: There is no such file.
    """

    def address(path: re.Match[str]) -> str:
        if not path[0].startswith("../"):
            return path[0]
        name = path[0].removeprefix("../")
        if not (REPOSITORY / name).exists():
            raise PluginError(f"{page.file.src_uri} links to {name}, which is not there")
        return f"{config.extra['repository']}/blob/main/{name}"

    return TARGET.sub(address, markdown)
