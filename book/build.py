"""Build the site into _build/html: `python book/build.py`, or with --all to start from nothing.

What the execution cache cannot see is watched here: when src/, the data that notebooks load, or requirements
change, cached outputs are dropped and every page is built again; when an extension changes, every page is.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXECUTED = ROOT / ".cache" / "jupyter"
STAMPS = ROOT / "_build" / ".inputs"
# What decides a notebook's outputs besides its own cells. data/*.yml and data/quiz are read by pages only.
NOTEBOOK_INPUTS = ("src/**/*.py", "src/**/*.yaml", "data/*/**/*", "requirements/*", "requirements.txt")
# What decides a page besides its own file and the dependencies that the extensions report.
PAGE_INPUTS = ("book/_ext/*.py", "_config.yml", "_toc.yml")


def digest(patterns: tuple[str, ...]) -> str:
    total = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and "__pycache__" not in name and not name.startswith("data/quiz/"):
                total.update(f"{name}\0{path.stat().st_size}\0".encode())
                total.update(path.read_bytes())
    return total.hexdigest()


def recorded(name: str) -> str | None:
    """The digest at the last build that succeeded."""
    stamp = STAMPS / name
    return stamp.read_text() if stamp.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="drop every cached page and output first")
    everything = parser.parse_args().all

    # taken before the build: what is edited while it runs counts as new for the next one
    now = {"notebooks": digest(NOTEBOOK_INPUTS), "pages": digest(PAGE_INPUTS)}
    stale = {name for name, value in now.items() if everything or recorded(name) != value}
    notebooks_stale, pages_stale = "notebooks" in stale, bool(stale)
    if notebooks_stale:
        shutil.rmtree(EXECUTED, ignore_errors=True)
    if pages_stale:
        shutil.rmtree(ROOT / "_build", ignore_errors=True)
    EXECUTED.mkdir(parents=True, exist_ok=True)

    scripts = Path(sys.executable).parent  # node, for KaTeX, stands beside python
    env = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(scripts / "jupyter-book"), "build", str(ROOT), "-W", "--keep-going"]
    done = subprocess.run(command, env=env, cwd=ROOT)
    if done.returncode == 0:
        STAMPS.mkdir(parents=True, exist_ok=True)
        for name, value in now.items():
            (STAMPS / name).write_text(value)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
