"""Keep notebooks stripped and written one way: `python book/strip_notebooks.py [--check] [files]`.

in: notebooks/*.ipynb (or the files named) -> out: the same without outputs, counts and editor metadata, in
one key order, with a final newline. Exits with 1 on a difference; with --check nothing is written.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT_TAGS = ("tags",)


def normalised(text: str) -> str:
    """Raises ValueError when the text is no notebook of format 4."""
    notebook = json.loads(text)
    if notebook.get("nbformat") != 4:
        raise ValueError(f"nbformat {notebook.get('nbformat')}: save it as format 4")
    cells = [_cell(i, cell) for i, cell in enumerate(notebook["cells"])]
    clean = {
        "cells": cells,
        "metadata": {"kernelspec": KERNEL, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(clean, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _cell(number: int, cell: dict) -> dict:
    source = "".join(cell["source"]).rstrip("\n")
    clean = {
        "cell_type": cell["cell_type"],
        "id": cell.get("id", f"c{number}"),
        "metadata": {key: cell["metadata"][key] for key in KEPT_TAGS if key in cell["metadata"]},
        "source": source.splitlines(keepends=True),
    }
    if cell["cell_type"] == "code":
        clean |= {"execution_count": None, "outputs": []}
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 on a difference")
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    different = []
    for path in args.files or sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        clean = normalised(text)
        if clean != text:
            different.append(path)
            if not args.check:
                path.write_text(clean, encoding="utf-8")
    for path in different:
        print(f"{path}: {'is not stripped and normalised' if args.check else 'stripped'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
