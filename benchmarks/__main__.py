"""Run every benchmark (or those named) and print their tables; JSON goes to benchmarks/results.

python -m benchmarks [core_algos growth placement protocol sampler trace training vllm_gap]
"""

import importlib
import os
import sys
from pathlib import Path

NAMES = sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))


def main() -> None:
    chosen = sys.argv[1:] or NAMES
    unknown = sorted(set(chosen) - set(NAMES))
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]!r}: choose from {', '.join(NAMES)}")
    del sys.argv[1:]  # a benchmark's own options are for running it alone
    os.environ["TQDM_DISABLE"] = "1"  # tables only
    for name in chosen:
        print(f"\n== {name} ==", flush=True)
        importlib.import_module(f"benchmarks.bench_{name}").main()


if __name__ == "__main__":
    main()
