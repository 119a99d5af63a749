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
STAMPS = {"notebooks": EXECUTED / ".inputs", "pages": ROOT / "_build" / ".inputs"}
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


def recorded(stamp: Path) -> str | None:
    """The digest that what lies beside the stamp was made from."""
    return stamp.read_text() if stamp.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="drop every cached page and output first")
    everything = parser.parse_args().all

    # taken before the build: what is edited while it runs counts as new for the next one
    now = {"notebooks": digest(NOTEBOOK_INPUTS), "pages": digest(PAGE_INPUTS)}
    stale = {name for name, stamp in STAMPS.items() if everything or recorded(stamp) != now[name]}
    if "notebooks" in stale:
        shutil.rmtree(EXECUTED, ignore_errors=True)
        # at once: outputs that a build leaves are good even where the build fails on some page
        STAMPS["notebooks"].parent.mkdir(parents=True, exist_ok=True)
        STAMPS["notebooks"].write_text(now["notebooks"])
    if stale:
        shutil.rmtree(ROOT / "_build", ignore_errors=True)

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
        STAMPS["pages"].write_text(now["pages"])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
