"""`actor_rollout_ref.model.external_lib`: a reader's own loss and estimator, known wherever they are used."""

import sys

import pytest
import tiny_run
from runs import QUIET

from minirl.config import compose
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY
from minirl.extern import import_external_libs
from minirl.trainer import PPOTrainer

LIB = "actor_rollout_ref.model.external_lib"
OWN = ["algorithm.adv_estimator=raw_score", "actor_rollout_ref.actor.policy_loss.loss_mode=log_likelihood"]


@pytest.fixture
def as_before(monkeypatch):
    """Names registered in the test are gone after it, and the module can be imported anew."""
    for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        monkeypatch.setattr(registry, "_functions", dict(registry))
    yield monkeypatch
    sys.modules.pop("readers_own", None)


def trainer(folder, *overrides):
    config = compose([*tiny_run.make(folder), *QUIET, *OWN, *overrides])
    return PPOTrainer(config, compute_score=tiny_run.coin)


def test_the_names_of_an_external_module_train_here_and_in_ray_processes_alike(
    tmp_path, as_before, ray_cluster
):
    here = trainer(tmp_path, f"{LIB}=readers_own").fit()
    in_processes = trainer(tmp_path, f"{LIB}=[readers_own]", "minirl.placement=ray")
    there = in_processes.fit()
    in_processes.actor_wg.shutdown()
    assert len(here) == len(there) == 2
    for mine, theirs in zip(here, there, strict=True):
        assert mine["actor/pg_loss"] != 0
        assert theirs["actor/pg_loss"] == pytest.approx(mine["actor/pg_loss"], rel=1e-5)


def test_without_the_module_its_names_are_unknown(tmp_path):
    with pytest.raises(ValueError, match="algorithm.adv_estimator: .*'raw_score'"):
        trainer(tmp_path)


def test_a_module_that_cannot_be_imported_is_named_with_its_key(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"{LIB}=no_such_lib: .*ModuleNotFoundError.*PYTHONPATH"):
        trainer(tmp_path, f"{LIB}=no_such_lib")
    (tmp_path / "broken_lib.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"{LIB}=broken_lib: importing it raised ZeroDivisionError"):
        import_external_libs("broken_lib")


def test_no_module_is_imported_by_default():
    assert compose([]).actor_rollout_ref.model.external_lib is None
    assert import_external_libs(None) is None
