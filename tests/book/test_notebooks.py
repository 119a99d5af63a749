"""Notebooks are stripped, written one way, and hold prose that a plain JupyterLab shows as meant."""

import json
import re
import subprocess
import sys

import pytest
from built_site import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_notebooks_are_stripped_and_normalised():
    command = [sys.executable, str(ROOT / "book" / "strip_notebooks.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + "run `python book/strip_notebooks.py`"


def test_stripping_takes_outputs_counts_and_editor_metadata_away(tmp_path):
    cell = {
        "cell_type": "code", "execution_count": 3, "outputs": [{"output_type": "stream"}],
        "metadata": {"collapsed": True, "tags": ["hide-input"]}, "source": "a = 1\nb = 2\n",
    }  # fmt: skip
    path = tmp_path / "n.ipynb"
    path.write_text(
        json.dumps({"cells": [cell], "metadata": {"vscode": {}}, "nbformat": 4, "nbformat_minor": 5})
    )
    command = [sys.executable, str(ROOT / "book" / "strip_notebooks.py"), str(path)]
    assert subprocess.run(command, capture_output=True).returncode == 1, "a change is reported to the hook"
    clean = json.loads(path.read_text())
    assert clean["cells"] == [
        {
            "cell_type": "code", "id": "c0", "execution_count": None, "outputs": [],
            "metadata": {"tags": ["hide-input"]}, "source": ["a = 1\n", "b = 2"],
        }
    ]  # fmt: skip
    assert "vscode" not in clean["metadata"]
    assert subprocess.run(command, capture_output=True).returncode == 0, "the second time nothing changes"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_prose_has_no_myst_syntax(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            assert not re.search(r"^(`{3,}|:{3,})\{|^\([\w-]+\)=|\{[\w-]+\}`", text, re.M), text[:200]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_defines_no_long_function(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            assert len(lines) <= 30, f"a cell of {len(lines)} lines: {lines[0]}"
