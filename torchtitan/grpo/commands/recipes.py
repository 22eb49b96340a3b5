"""List the recipes of train_configs, or copy some into the working directory, where their relative paths hold."""

import re
import shutil
from argparse import Namespace
from pathlib import Path
from textwrap import fill

from torchtitan.grpo.errors import UserError, did_you_mean

RECIPES = Path(__file__).parents[1] / "recipes"
HERE = Path("train_configs")
COLUMNS = 100
"""Width of the list."""


def main(arguments: Namespace) -> int:
    titles = {path.name: title(path) for path in sorted(RECIPES.glob("*.toml"))}
    if not arguments.names:
        for name, said in titles.items():
            width = max(map(len, titles)) + 2
            print(fill(said, COLUMNS, initial_indent=name.ljust(width), subsequent_indent=" " * width))
    for name in arguments.names:
        if name not in titles:
            raise UserError(f"there is no recipe {name}{did_you_mean(name, titles)}; without a NAME, all are listed")
        if (HERE / name).exists():
            raise UserError(f"{HERE / name} is there already: move it away, or train with it as it is")
    for name in arguments.names:
        for each in [name, *named_in((RECIPES / name).read_text(encoding="utf-8"))]:
            copy(RECIPES / each, HERE / each)
    return 0


def title(recipe: Path) -> str:
    """The first sentence of its first comment."""
    comment = re.match(r"(#.*\n)+", recipe.read_text(encoding="utf-8"))
    words = " ".join(comment[0].replace("#", " ").split()) if comment else ""
    return re.split(r"(?<=[.:]) ", words)[0].rstrip(":")


def named_in(recipe: str) -> list[str]:
    """Files and folders of train_configs that the text of a recipe names, as path or as module."""
    words = set(re.findall(r"train_configs[/.](\w[\w.-]*\w)", recipe))
    return sorted(path.name for path in RECIPES.iterdir() if path.name in words or path.stem in words)


def copy(source: Path, target: Path) -> None:
    """A file or a folder, unless it is there."""
    if target.exists():
        return
    target.parent.mkdir(exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    print(f"wrote {target}")
