"""Run every benchmark (or those named) and print their tables; JSON goes to benchmarks/results.

python -m benchmarks [core_algos protocol sampler training trace growth vllm_gap]
"""

import importlib
import sys
from pathlib import Path

NAMES = sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))


def main() -> None:
    chosen = sys.argv[1:] or NAMES
    unknown = sorted(set(chosen) - set(NAMES))
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]!r}: choose from {', '.join(NAMES)}")
    for name in chosen:
        print(f"\n== {name} ==", flush=True)
        importlib.import_module(f"benchmarks.bench_{name}").main()


if __name__ == "__main__":
    main()
