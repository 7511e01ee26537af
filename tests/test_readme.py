"""The README is true: what it says of the settings is what they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from hydra_plugins.hydra_gpu_pool_launcher._settings import DEFAULTS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def rows() -> dict[str, Any]:
    """Of the tables of settings: each key's default, as YAML reads it."""
    section = README[README.index("\n## Settings\n") : README.index("\n## What you see\n")]
    found = re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| ", section, re.MULTILINE)
    return {key: yaml.safe_load(default.strip("`")) for key, default in found}


def test_every_key_has_its_row_with_its_default() -> None:
    expected = {key: value for key, value in DEFAULTS.items() if key != "ddp"}
    expected |= {f"ddp.{key}": value for key, value in DEFAULTS["ddp"].items()}
    assert rows() == expected


def test_every_link_within_leads_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    there = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= there


def test_every_file_that_it_shows_or_names_is_there() -> None:
    for path in re.findall(r"\]\((?!#|http)([^)]+)\)", README):
        assert (Path(__file__).parent.parent / path).is_file(), path
