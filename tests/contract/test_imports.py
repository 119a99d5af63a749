"""Who imports whom, and how long `import minirl` takes to load next to nothing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_import_contracts_hold():
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-2000:]


def test_importing_minirl_loads_no_heavy_library():
    code = "import minirl, sys; print([m for m in ('ray','vllm','verl','transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_the_trainer_loads_neither_verl_nor_ray_nor_vllm():
    code = (
        "import minirl.trainer, minirl.rollout.builtin, sys;"
        "print([m for m in ('ray', 'vllm', 'verl') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stderr[-500:]
