"""What each notebook costs on this machine: seconds and peak memory, into data/notebook_costs.json.

Run by hand on a quiet machine; 怎么跑 shows the table. Each notebook runs alone, in processes of its own.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cost(notebook: Path) -> dict[str, float]:
    """Wall seconds and the peak MiB of the largest process (the kernel)."""
    command = [Path(sys.executable).parent / "jupyter", "nbconvert", "--to", "notebook", "--execute"]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [*command, "--output-dir", folder, notebook],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{notebook.name} failed; run it with jupyter nbconvert --execute to see why")
    return {"seconds": round(time.perf_counter() - start), "peak_mib": round(usage.ru_maxrss / 1024)}


def main() -> None:
    costs = {path.stem: cost(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    machine = f"CPU，{os.cpu_count()} 核，Python {platform.python_version()}，{date.today()}"
    target = ROOT / "data" / "notebook_costs.json"
    target.write_text(
        json.dumps({"machine": machine, "notebooks": costs}, ensure_ascii=False, indent=1) + "\n"
    )
    print(target.read_text())


if __name__ == "__main__":
    main()
