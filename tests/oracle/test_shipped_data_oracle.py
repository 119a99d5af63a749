"""The shipped rows go through verl's own routing and scoring."""

import pyarrow.parquet
import pytest

from minirl.data.build import SHIPPED
from minirl.pin import use_verl

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("split", ["train", "test"])
def test_verl_gives_1_to_every_shipped_answer_and_0_to_another(split):
    use_verl()
    from verl.utils.reward_score import default_compute_score

    rows = pyarrow.parquet.read_table(SHIPPED / "gsm8k_mini" / f"{split}.parquet").to_pylist()
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    answers = [row["extra_info"]["answer"] for row in rows]
    for row, answer, truth in zip(rows, answers, truths, strict=True):
        assert default_compute_score(row["data_source"], answer, truth) == 1
        assert default_compute_score(row["data_source"], answer + "0", truth) == 0
