"""docs/by_symptom.md has the sections that messages and reports send a user to, and names metrics that there are."""

import re

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "by_symptom.md").read_text(encoding="utf-8")


def test_every_section_that_code_names_is_there():
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    files = [path for name in ("torchtitan", "scripts") for path in (ROOT / name).rglob("*.*")]
    code = {path.name: path.read_text() for path in files if path.suffix in (".py", ".html")}
    named = {section for text in code.values() for section in re.findall(r"by_symptom\.md#([a-z-]+)", text)}
    named |= set(re.findall(r'"([a-z]+(?:-[a-z]+){2,})"', code["findings.py"]))
    assert len(named) >= 9 and named <= sections, named - sections


def test_its_metrics_are_in_the_lists():
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    groups = "reward|rollout|policy|server|sync|train|memory|data|validation|age|time"
    named = set(re.findall(rf"`((?:{groups})/[\w<>/]+)`", PAGE))
    stages = {f"time/{stage}_s" for stage in ("rollout", "reward", "train", "validate", "checkpoint")}
    assert not {name for name in named - stages if f"`{name}`" not in metrics}
