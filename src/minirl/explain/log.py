"""verl's console log ("step:3 - actor/pg_loss:0.01 - ...") as a table, and what each number says.

in: the text of a log, other lines and prefixes included -> out: a `Log`.
simplified: the console format only; no wandb or tensorboard files.
verl: verl.utils.logger.aggregate_logger:concat_dict_to_str
"""

import ast
import math
import re
from dataclasses import dataclass

from minirl.explain.catalogue import metric
from minirl.explain.signs import Sign, signs_in

_STEP = re.compile(r"(?:^|\s)step:(\d+)((?: - \S+:\S+)+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMPY = re.compile(r"np\.\w+\((.*)\)")
# what most steps of every run print and few readers need, at the end of the report
_LATER = ("timing_s/", "timing_per_token_ms/", "perf/", "actor/perf/", "critic/perf/", "variance_proxy/")


@dataclass(frozen=True)
class Log:
    """The metrics of every logged step, in order; the same as `PPOTrainer.history`."""

    history: list[dict[str, float]]

    def names(self) -> list[str]:
        """Every metric that some step printed, in the order of first appearance."""
        return list(dict.fromkeys(name for step in self.history for name in step if name != "step"))

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric was printed. Raises ValueError: a metric that was not."""
        points = [(int(step["step"]), step[name]) for step in self.history if name in step]
        if not points:
            raise ValueError(f"no metric {name} in this log")
        return points

    def signs(self) -> list[Sign]:
        """What looks sick, with the step where it showed first."""
        return signs_in(self.history)

    def unknown(self) -> list[str]:
        """Printed metrics without an entry in data/metrics.yml."""
        return [name for name in self.names() if metric(name) is None]

    def rows(self) -> list[dict[str, str]]:
        """One row a metric, with the headings of the page, for a table."""
        rows = []
        for name in sorted(self.names(), key=lambda name: name.startswith(_LATER)):
            points, entry = self.series(name), metric(name) or {}
            rows.append(
                {
                    "指标": name,
                    "第一次": _short(points[0][1]),
                    "最后一次": _short(points[-1][1]),
                    "怎么算": entry.get("formula", "指标表里没有"),
                    "正常的样子": entry.get("healthy", ""),
                    "不正常时": entry.get("bad", ""),
                    "verl 符号": entry.get("symbol", "").partition(":")[2],
                }
            )
        return rows

    def text(self) -> str:
        """The same for a terminal: signs first, then metric by metric."""
        steps = [int(step["step"]) for step in self.history]
        lines = [f"{len(steps)} 行日志，第 {steps[0]} 到 {steps[-1]} 步，{len(self.names())} 个指标", ""]
        signs = self.signs()
        lines += [f"! 第 {sign.step} 步 {sign.metric}：{sign.zh}" for sign in signs] or ["没有看到病征"]
        for row in self.rows():
            lines += ["", f"{row['指标']}  {row['第一次']} → {row['最后一次']}"]
            lines += [f"    怎么算：{row['怎么算']}"]
            lines += [f"    正常：{row['正常的样子']}"] if row["正常的样子"] else []
            lines += [f"    不正常：{row['不正常时']}"] if row["不正常时"] else []
            lines += [f"    {row['verl 符号']}"] if row["verl 符号"] else []
        return "\n".join(lines)


def parse_log(text: str) -> Log:
    """Find the lines that verl's console logger wrote; the others are skipped.

    Raises ValueError: no such line.
    """
    history = []
    for line in _ANSI.sub("", text).splitlines():
        found = _STEP.search(line)
        if not found:
            continue
        step: dict[str, float] = {"step": int(found[1])}
        for part in found[2].split(" - ")[1:]:
            name, _, value = part.rpartition(":")
            number = _number(value)
            if number is not None:
                step[name] = number
        history.append(step)
    if not history:
        raise ValueError('no line "step:1 - name:value - ..." in the text: is this a console log of verl?')
    return Log(history)


def _number(text: str) -> float | None:
    """The number that a repr stands for, read as a literal; None for anything else."""
    wrapped = _NUMPY.fullmatch(text)
    text = wrapped[1] if wrapped else text
    if text.lstrip("-") in ("nan", "inf"):
        return float(text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return value if isinstance(value, int | float) else None


def _short(value: float) -> str:
    if isinstance(value, bool | int) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}"
