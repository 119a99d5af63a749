"""Every verl symbol that minirl's docstrings name exists at the pin, or in the later version they name."""

import re
from pathlib import Path

import pytest

from minirl.pin import LATER, PIN, find_symbol

SRC = Path(__file__).parent.parent / "src" / "minirl"
SPEC = re.compile(r"(verl(?:\.\w+)+:[A-Za-z_]\w*(?:\.\w+)*)")
EXAMPLES = {"verl.module:Qual.name", "verl.x.y:Qual.name"}  # in pin.py, to show the form

NAMED = sorted(
    {
        (spec, LATER if LATER in line else PIN)
        for path in SRC.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        for spec in SPEC.findall(line)
        if spec not in EXAMPLES
    }
)


@pytest.mark.parametrize(("spec", "version"), NAMED)
def test_named_symbol_exists(spec, version):
    assert find_symbol(spec, version).lines


def test_there_are_many():
    assert len(NAMED) > 100
