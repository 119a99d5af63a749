"""The lifeline: one batch's ten stations as a row of links, with some of them lit; large on the home page.

in: station ids, for `{lifeline}` also one sentence per station -> out: a <nav> that reads without scripts.
Stations, their order and the keys they write come from minirl.ledger. Links go to the labels
`station-<id>` of the source map once that page exists. verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit
"""

from html import escape

import plain_yaml
from book_directive import BookDirective
from docutils import nodes
from html_part import label_link, part, raw

from minirl.ledger import LEDGER, STATIONS

MAP = "book/week1/day2_source_map"
CONTAINERS = ("batch", "non_tensor_batch", "meta_info")


def check_stations(ids: list[str]) -> None:
    known = [station.id for station in STATIONS]
    for name in ids:
        if name not in known:
            raise ValueError(f"no station {name!r}; the ten are {' '.join(known)}")


def station_link(env, station, *children: nodes.Node) -> nodes.Node:
    """A link into the source map, or plain text while that page is not written."""
    if MAP not in env.found_docs:
        return part("span", *children, class_="life-here")
    return label_link(MAP, f"station-{station.id}", *children, from_doc=env.docname)


def small_lifeline(env, lit: list[str]) -> nodes.Node:
    listing = part("ol")
    for number, station in enumerate(STATIONS, 1):
        on = station.id in lit
        listing += part(
            "li",
            station_link(
                env,
                station,
                part("span", str(number), class_="life-no"),
                part("span", station.title_zh, class_="life-name"),
                *([part("span", "（本章）", class_="sr-only")] if on else []),
            ),
            class_="is-lit" if on else None,
        )
    return part("nav", listing, class_="lifeline", aria_label="一个 batch 的十站，亮的是本章讲的")


class LifelineDirective(BookDirective):
    """The body is YAML: `station: one sentence`, all ten."""

    has_content = True

    def build(self) -> list[nodes.Node]:
        words = plain_yaml.load("\n".join(self.content)) or {}
        check_stations(list(words))
        missing = [station.id for station in STATIONS if station.id not in words]
        if missing:
            raise ValueError(f"no sentence for {' '.join(missing)}")
        listing = part("ol")
        for number, station in enumerate(STATIONS, 1):
            title = station_link(self.env, station, nodes.Text(station.title_zh))
            entry = part("li", part("span", str(number), class_="life-no", aria_hidden="true"))
            entry += part("div", part("p", title, part("code", station.verl_call), class_="life-title"),
                          part("p", *self.phrase(words[station.id]), class_="life-words"),
                          _keys(station.id), class_="life-body")  # fmt: skip
            listing += entry
        back = part("p", "↺ 新权重到了 rollout，下一个 batch 从第 1 站重新开始", class_="life-back")
        return [part("nav", listing, back, class_="lifeline-large", aria_label="fit() 里一个 batch 的十站")]


def _keys(station: str) -> nodes.Node:
    """What this station adds to the batch, by container, from the ledger."""
    fields = [field for field in LEDGER.values() if field.station == station and not field.minirl_only]
    rows = []
    for container in CONTAINERS:
        names = [field.name for field in fields if field.container == container]
        if names:
            keys = " ".join(f"<code>{escape(name)}</code>" for name in names)
            rows.append(f'<span class="life-box life-{container}"><b>{container}</b> + {keys}</span>')
    return raw(f'<p class="life-keys">{"".join(rows)}</p>' if rows else "")


def setup(app):
    app.setup_extension("html_part")
    app.setup_extension("book_directive")
    app.add_directive("lifeline", LifelineDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
