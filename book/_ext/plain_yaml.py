"""YAML whose one-line values are plain text: `note: `uid` 在 #1 里: 见下` needs no quotes.

in: the body of a directive -> out: what YAML gives. A value in quotes, `|`, `>`, or going on below is YAML's.
"""

import json
import re

import yaml

_VALUE = re.compile(r"""^(\s*(?:- )?)([\w-]+:) +(?![|>]-?\s*$)(?!(["']).*\3\s*$)(\S.*)$""")


def load(text: str):
    """Raises yaml.YAMLError."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        found = _VALUE.match(line)
        following = lines[i + 1] if i + 1 < len(lines) else ""
        if found and not _goes_on(following, len(found[1])):
            lines[i] = f"{found[1]}{found[2]} {json.dumps(found[4].rstrip(), ensure_ascii=False)}"
    return yaml.safe_load("\n".join(lines))


def _goes_on(line: str, indent: int) -> bool:
    return bool(line.strip()) and len(line) - len(line.lstrip()) > indent
