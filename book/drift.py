"""What moving the pin would touch: `make drift VERL=x.y.z`.

Every excerpt, symbol, claim and config key that the book names is looked up in another installed version:
unchanged, changed, moved or gone. Reads sources only; nothing is imported.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

from minirl.pin import PIN, find_symbol, verl_root

ROOT = Path(__file__).parent.parent
SPEC = re.compile(r"verl(?:\.\w+)+:[A-Za-z_][\w.]*")
KEY_ROOTS = ("algorithm", "actor_rollout_ref", "critic", "data", "trainer", "reward", "distillation")
KEY = re.compile(rf"`((?:{'|'.join(KEY_ROOTS)})(?:\.\w+)+)(?:=[^`]*)?`")


def pages() -> list[Path]:
    """Everything in which a reader, or the code, names verl."""
    found = []
    for pattern in (
        "book/**/*.md",
        "book/**/*.claims.yml",
        "data/**/*.yml",
        "notebooks/*.ipynb",
        "src/**/*.py",
    ):
        found += sorted(ROOT.glob(pattern))
    return found


def mentions(pattern: re.Pattern) -> dict[str, list[str]]:
    """Each name, with the files that use it."""
    where: dict[str, list[str]] = {}
    for path in pages():
        for match in pattern.finditer(path.read_text(encoding="utf-8")):
            name = (match[1] if pattern.groups else match[0]).rstrip(".")
            files = where.setdefault(name, [])
            if (file := str(path.relative_to(ROOT))) not in files:
                files.append(file)
    return where


def state_of_symbol(spec: str, version: str) -> str:
    """unchanged, changed, moved to another file, gone, or unknown (no symbol at the pin either)."""
    try:
        here = find_symbol(spec, PIN)
    except (ValueError, FileNotFoundError):
        return "unknown"
    try:
        there = find_symbol(spec, version)
    except (ValueError, FileNotFoundError):
        name = spec.partition(":")[2].split(".")[0]
        declared = re.compile(rf"^(?:class|def|async def) {re.escape(name)}\b", re.M)
        sources = (verl_root(version) / "verl").rglob("*.py")
        new = [p for p in sources if declared.search(p.read_text(encoding="utf-8"))]
        return f"moved to {new[0].relative_to(verl_root(version))}" if new else "gone"
    return "unchanged" if here.sha == there.sha else "changed"


def config_keys(version: str) -> set[str]:
    """All dotted paths of the expanded default configuration."""
    path = verl_root(version) / "verl/trainer/config/_generated_ppo_trainer.yaml"
    found: set[str] = set()

    def walk(node: object, prefix: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                found.add(prefix + str(key))
                walk(value, f"{prefix}{key}.")

    walk(yaml.safe_load(path.read_text(encoding="utf-8")), "")
    return found


def report(version: str) -> int:
    """Print what is not unchanged; returns how many names need a look."""
    counts: dict[str, int] = {}
    touched = 0
    for spec, files in sorted(mentions(SPEC).items()):
        state = state_of_symbol(spec, version)
        counts[state.split(" ")[0]] = counts.get(state.split(" ")[0], 0) + 1
        if state != "unchanged":
            touched += 1
            print(f"{state:10}  {spec}\n            {', '.join(files)}")
    old, new = config_keys(PIN), config_keys(version)
    for key, files in sorted(mentions(KEY).items()):
        if key in old and key not in new:
            touched += 1
            counts["key gone"] = counts.get("key gone", 0) + 1
            print(f"{'key gone':10}  {key}\n            {', '.join(files)}")
    print(f"\nverl {PIN} -> {version}: " + ", ".join(f"{n} {state}" for state, n in sorted(counts.items())))
    return touched


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python book/drift.py VERSION   (make drift VERL=x.y.z installs that version first)")
    report(sys.argv[1])
