"""Traces as tables: for a notebook (HTML that needs no script, no file, no network) and for a terminal.

in: StepRecord -> out: `ShapeTable`, `TokenStrip`, each with `_repr_html_` and `__str__`.
Every number is written out; colour (blue above zero, orange below) only repeats it. All text is escaped.
"""

from html import escape
from unicodedata import east_asian_width

from minirl.ledger import LEDGER, LETTERS, STATIONS
from minirl.trace import KeyRecord, StationRecord, StepRecord

MARKS = {
    "added": "+ 新增",
    "changed": "~ 改写",
    "repeated": "× 重复",
    "returned": "↩ 取回",
    "dropped": "- 未带走",
    "kept": "",
}
TITLES = {station.id: station.title_zh for station in STATIONS}
STRIP_ROWS = (  # in the order in which the stations write them
    "response_mask",
    "rollout_log_probs",
    "rm_scores",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "token_level_rewards",
    "rollout_is_weights",
    "advantages",
    "returns",
)

# one rule set for both; the theme's variables where there is a theme, the page's own colours elsewhere
STYLE = """<style>
.mrl{overflow-x:auto;max-width:100%;font-size:.85em;color:var(--pst-color-text-base,inherit)}
.mrl table{border-collapse:collapse;width:auto;margin:0;color:inherit}
.mrl caption{caption-side:top;text-align:left;padding:.3em 0;color:inherit}
.mrl th,.mrl td{padding:.15em .55em;text-align:left;white-space:nowrap;color:inherit;background:transparent;
border-bottom:1px solid var(--pst-color-border,rgba(128,128,128,.35));vertical-align:top}
.mrl td.n,.mrl .strip td{text-align:right;font-variant-numeric:tabular-nums}
.mrl th.s{padding-top:.8em;font-weight:600}
.mrl tr.added td:first-child,.mrl tr.added code{font-weight:700}
.mrl code{background:none;color:inherit;padding:0}
.mrl .strip th.k{position:sticky;left:0;background:var(--pst-color-background,Canvas);font-weight:400}
.mrl .strip td.p{white-space:pre-wrap;min-width:9em;max-width:16em;text-align:left;
border-right:3px double var(--pst-color-border,rgba(128,128,128,.6))}
.mrl .strip .t{font-family:monospace;text-align:center;white-space:pre}
.mrl details{margin:.3em 0}
</style>"""
OPEN = f'{STYLE}<div class="mrl" tabindex="0">'


class ShapeTable:
    """What every station of one step (or only `stations`) added, changed, repeated and dropped."""

    def __init__(self, step: StepRecord, stations: tuple[str, ...] = ()):
        self.step = step
        self.stations = {n: r for n, r in step.stations.items() if not stations or n in stations}

    def _repr_html_(self) -> str:
        body = "".join(self._station_html(record) for record in self.stations.values())
        heads = "".join(f'<th scope="col">{text}</th>' for text in HEADS)
        caption = f"<caption>{escape(sizes_text(self.step.sizes))}</caption>"
        return f"{OPEN}<table>{caption}<thead><tr>{heads}</tr></thead>{body}</table></div>"

    def _station_html(self, record: StationRecord) -> str:
        rows = [
            f'<tr><th class="s" colspan="{len(HEADS)}" scope="rowgroup">{escape(heading(record))}</th></tr>'
        ]
        for status, cells in station_rows(record):
            tds = [f"<td>{escape(cells[0])}</td>", f"<td><code>{escape(cells[1])}</code></td>"]
            tds += [
                f"<td{' class=n' if i == 4 else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells[2:])
            ]
            rows.append(f'<tr class="{status}">{"".join(tds)}</tr>')
        rows.append(f'<tr><td></td><td colspan="{len(HEADS) - 1}">{escape(kept_text(record))}</td></tr>')
        return f"<tbody>{''.join(rows)}</tbody>"

    def __str__(self) -> str:
        lines = [sizes_text(self.step.sizes)]
        tables = {name: [cells for _, cells in station_rows(r)] for name, r in self.stations.items()}
        everything = [HEADS, *(cells for table in tables.values() for cells in table)]
        widths = [max(_width(cells[i]) for cells in everything) for i in range(len(HEADS))]
        for name, record in self.stations.items():
            lines += ["", heading(record)]
            lines += ["  " + _columns(cells, widths) for cells in tables[name]]
            if text := kept_text(record):
                lines.append(f"  {text}")
        return "\n".join(lines)

    __repr__ = __str__


HEADS = ("标记", "键", "容器", "之前", "之后", "dtype", "字节", "写入者")


def heading(record: StationRecord) -> str:
    """E.g. "3 生成 rollout，1.234 s，16 行 → 128 行"."""
    number = [station.id for station in STATIONS].index(record.name) + 1
    text = f"{number} {TITLES[record.name]} {record.name}，{record.seconds:.3f} s"
    if record.rows_before != record.rows_after:
        text += f"，{record.rows_before} 行 → {record.rows_after} 行"
    return text + ("，行序变了" if record.reordered else "")


def station_rows(record: StationRecord) -> list[tuple[str, tuple[str, ...]]]:
    """(status, cells as in HEADS) of every key that is not as it was."""
    rows = []
    for key in record.keys.values():
        if key.status != "kept":
            before = dims_text(key.dims_before, key.shape_before)
            after = key.value if key.value is not None else dims_text(key.dims, key.shape)
            after += f"，即 {key.alias_of}" if key.alias_of else ""
            size = f"{key.bytes:,}" if key.bytes else ""
            cells = (MARKS[key.status], key.name, key.container, before, after, key.dtype, size, writer(key))
            rows.append((key.status, cells))
    for name in record.dropped:
        container = LEDGER[name].container if name in LEDGER else ""
        rows.append(("dropped", (MARKS["dropped"], name, container, "", "", "", "", "")))
    return rows


def kept_text(record: StationRecord) -> str:
    kept = sum(key.status == "kept" for key in record.keys.values())
    parts = [f"另有 {kept} 个键未变"] if kept else []
    if record.metrics:
        shown = "、".join(record.metrics[:4]) + (" …" if record.metrics[4:] else "")
        parts.append(f"指标 {len(record.metrics)} 个：{shown}")
    return "；".join(parts)


def writer(key: KeyRecord) -> str:
    return LEDGER[key.name].writer if key.name in LEDGER else "（不在字段表里）"


def dims_text(dims: str | None, shape: list[int] | None) -> str:
    """`[B, R] = [128, 24]`"""
    if not shape:
        return ""
    numbers = f"[{', '.join(map(str, shape))}]"
    return f"[{', '.join(dims.split())}] = {numbers}" if dims else numbers


def sizes_text(sizes: dict[str, int]) -> str:
    known = [(letter, LETTERS[letter].split("，")[0], n) for letter, n in sizes.items() if letter in LETTERS]
    return "；".join(f"{letter} = {n}（{meaning}）" for letter, meaning, n in known)


class TokenStrip:
    """One sample: its prompt, its response tokens, and what every station wrote for each of them."""

    def __init__(self, step: StepRecord, sample: int):
        self.sample = sample
        responses, prompts = step.row(sample, "responses"), step.row(sample, "prompts")
        if responses is None:
            raise ValueError(
                f"sample {sample} has no responses in this step: the trace ended before the rollout"
            )
        attention = step.row(sample, "attention_mask") or [1] * (len(prompts) + len(responses))
        text = step.tokens.get(sample, {})
        real = [i for i in range(len(responses)) if attention[len(prompts) + i]]
        response_text = text.get("responses") or [str(token) for token in responses]
        ids = " ".join(str(token) for token, on in zip(prompts, attention, strict=False) if on)
        self.prompt = text["prompts"][0] if "prompts" in text else ids
        self.tokens = [response_text[i] for i in real]
        self.rows = {}
        for key in STRIP_ROWS:
            values = step.row(sample, key)
            if values is not None:
                self.rows[key] = [values[i] for i in real]

    def _repr_html_(self) -> str:
        count = len(self.rows) + 1
        tokens = "".join(f'<th scope="col" class="t">{escape(_visible(token))}</th>' for token in self.tokens)
        prompt = f'<td class="p" rowspan="{count}">{escape(self.prompt)}</td>'
        head = f'<tr><th class="k" scope="row">token</th>{prompt}{tokens}</tr>'
        body = ""
        for name, values in self.rows.items():
            scale = max((abs(v) for v in values), default=0) or 1
            coloured = name != "response_mask"
            cells = "".join(
                f"<td{_colour(v / scale) if coloured else ''}>{number(name, v)}</td>" for v in values
            )
            body += f'<tr><th class="k" scope="row"><code>{name}</code></th>{cells}</tr>'
        caption = (
            f"<caption>轨迹 {self.sample}：左边是 prompt，右边是响应的 {len(self.tokens)} 个 token</caption>"
        )
        return f'{OPEN}<table class="strip">{caption}{head}{body}</table></div>'

    def __str__(self) -> str:
        heads = ("token", *self.rows)
        lines = [heads]
        for i, token in enumerate(self.tokens):
            lines.append((_visible(token), *(number(name, values[i]) for name, values in self.rows.items())))
        widths = [max(_width(cells[i]) for cells in lines) for i in range(len(heads))]
        table = [_columns(cells, widths) for cells in lines]
        return "\n".join([f"轨迹 {self.sample}", f"prompt: {self.prompt}", *table])

    __repr__ = __str__


def number(row: str, value: float) -> str:
    """With sign and two decimals; plain 0 and 1 in a mask."""
    if row == "response_mask":
        return str(int(value))
    return "0" if value == 0 else f"{value:+.2f}"


def _colour(share: float) -> str:
    """Blue above zero, orange below; see-through, so that the text stays readable on light and dark."""
    if not share or share != share:
        return ""
    red, green, blue = (37, 99, 235) if share > 0 else (234, 88, 12)
    return f' style="background:rgba({red},{green},{blue},{0.1 + 0.4 * min(abs(share), 1):.2f})"'


def _visible(token: str) -> str:
    """Blanks and line ends of a token, so that they can be seen."""
    return token.replace("\n", "⏎").replace(" ", "␣") or "∅"


def _width(text: str) -> int:
    return sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def _columns(cells, widths: list[int]) -> str:
    return "  ".join(
        cell + " " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=True)
    ).rstrip()
