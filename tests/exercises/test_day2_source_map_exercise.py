"""The day 2 cards say what the ledger says, and the checker explains the first card that is too early."""

import json
import re
from pathlib import Path

import pytest

from minirl.exercises import day2_source_map as exercise
from minirl.ledger import LEDGER, STATIONS

RIGHT = [exercise.LETTERS[exercise._SHUFFLED.index(i)] for i in range(10)]


def test_every_key_on_a_card_is_written_at_that_station():
    assert list(exercise.TRACES) == [station.id for station in STATIONS]
    for station, keys in exercise.TRACES.items():
        assert keys or station in exercise.NO_KEYS
        assert [LEDGER[key].station for key in keys] == [station] * len(keys)


def test_the_right_order_passes_in_either_case():
    assert exercise.check_order(RIGHT).startswith("十站")
    assert exercise.check_order([letter.lower() for letter in RIGHT]).startswith("十站")


def test_the_cards_are_not_shown_in_the_right_order():
    assert list(exercise.cards()) != RIGHT and len(set(exercise.cards().values())) == 10


@pytest.mark.parametrize("place", range(9))
def test_a_swap_of_neighbours_is_explained(place):
    order = RIGHT.copy()
    order[place : place + 2] = order[place + 1], order[place]
    station = STATIONS[place + 1].id
    with pytest.raises(ValueError, match=re.escape(exercise.WHY[station])):
        exercise.check_order(order)


def test_missing_and_doubled_cards_are_named():
    with pytest.raises(ValueError, match=f"还差 1 张：{RIGHT[0]}"):
        exercise.check_order(RIGHT[1:])
    with pytest.raises(ValueError, match="两次"):
        exercise.check_order([*RIGHT, RIGHT[0]])


def test_try_it_reports_without_raising(capsys):
    for order in ([], RIGHT[::-1], RIGHT):
        exercise.try_it(order)
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == ["…", "✘", "✔"]


def test_the_solution_folded_into_the_notebook_passes():
    notebook = Path(__file__).resolve().parents[2] / "notebooks/day2_source_map.ipynb"
    text = "".join("".join(cell["source"]) for cell in json.loads(notebook.read_text("utf-8"))["cells"])
    solution = re.search(r"<details>.*?`(\[.*?\])`", text, re.S)[1]
    assert exercise.check_order(json.loads(solution)).startswith("十站")
