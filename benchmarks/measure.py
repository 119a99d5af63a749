"""Timing that can be compared: CPU seconds of this process, medians, both sides alternating in one run."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def cpu_seconds(fn: Callable[[], object]) -> float:
    start = time.process_time()
    fn()
    return time.process_time() - start


def alternate(sides: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 1) -> dict[str, float]:
    """Median CPU seconds of each side, measured A B A B ..., so that a drifting machine hits both alike."""
    for fn in sides.values():
        for _ in range(warmup):
            fn()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, fn in sides.items():
            seconds[name].append(cpu_seconds(fn))
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(name: str, rows: list[dict]) -> None:
    """Print rows as a table and save them as JSON."""
    columns = list(rows[0])
    cells = [[_text(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=1))


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
