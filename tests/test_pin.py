import sys

import pytest

from minirl.pin import LATER, PIN, find_symbol, use_verl, verl_root


def test_both_versions_are_found():
    for version in (PIN, LATER):
        assert (verl_root(version) / "verl" / "trainer" / "ppo" / "ray_trainer.py").is_file()


def test_a_version_that_is_not_installed_names_make_setup():
    with pytest.raises(ValueError, match="verl 0.0.1 is not installed.*make setup"):
        verl_root("0.0.1")


def test_the_environment_variable_comes_first(monkeypatch, tmp_path):
    package = tmp_path / PIN / "verl"
    package.mkdir(parents=True)
    (package / "protocol.py").write_text("")
    monkeypatch.setenv("MINIRL_VERL_DIR", str(tmp_path))
    assert verl_root() == tmp_path / PIN


def test_use_verl_appends_once(monkeypatch):
    monkeypatch.setattr(sys, "path", ["first"])
    use_verl()
    use_verl()
    assert sys.path == ["first", str(verl_root())]


def test_a_symbol_starts_at_its_first_decorator():
    symbol = find_symbol("verl.trainer.ppo.ray_trainer:RayPPOTrainer")
    assert symbol.lines[0].startswith("@deprecated(")
    assert symbol.file == "verl/trainer/ppo/ray_trainer.py"
    method = find_symbol("verl.trainer.ppo.ray_trainer:RayPPOTrainer._get_gen_batch")
    assert symbol.start < method.start < method.end < symbol.end
    assert method.lines[0].strip().startswith("def _get_gen_batch(")


def test_assigned_names_and_class_fields_are_symbols():
    assert (
        find_symbol("verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY")
        .lines[0]
        .startswith("ADV_ESTIMATOR_REGISTRY")
    )
    assert "clip_ratio" in find_symbol("verl.workers.config.actor:ActorConfig.clip_ratio").lines[0]


def test_a_package_is_found_in_its_init():
    assert (
        find_symbol("verl.utils.reward_score:default_compute_score").file
        == "verl/utils/reward_score/__init__.py"
    )


def test_own_symbols_come_from_src():
    symbol = find_symbol("minirl.pin:find_symbol")
    assert symbol.version is None and symbol.file == "minirl/pin.py"
    assert symbol.lines[0].startswith("def find_symbol(")


def test_the_same_text_has_the_same_sha_in_both_versions_and_a_changed_one_has_not():
    same = "verl.protocol:DataProto.repeat"
    assert find_symbol(same, PIN).sha == find_symbol(same, LATER).sha
    changed = "verl.trainer.ppo.ray_trainer:RayPPOTrainer._update_actor"
    assert find_symbol(changed, PIN).sha != find_symbol(changed, LATER).sha


@pytest.mark.parametrize(
    "spec, message",
    [
        ("verl.protocol", "write it as"),
        ("verl.no_such:thing", "no module verl.no_such"),
        ("verl.protocol:DataProto.no_such", "no 'no_such' in verl/protocol.py"),
    ],
)
def test_what_does_not_exist_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        find_symbol(spec)
