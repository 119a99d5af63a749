"""The line under every page: which verl, which minirl, what the notebooks ran on, when the site was built.

in: the pins and this machine -> out: the theme's extra_footer. SOURCE_DATE_EPOCH fixes the date.
"""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version

from minirl.pin import LATER, PIN


def footer(app, config) -> None:
    stamp = os.environ.get("SOURCE_DATE_EPOCH")
    day = datetime.fromtimestamp(int(stamp), UTC) if stamp else datetime.now(UTC)
    config.html_theme_options["extra_footer"] = (
        f'<p class="pins">源码：verl {PIN}（对照 {LATER}），Apache-2.0 · minirl {version("minirl")} · '
        f"torch {version('torch')} · 笔记本运行于 {device()} · 构建于 {day:%Y-%m-%d}</p>"
    )


def device() -> str:
    """The GPU's name, or the CPU's kind."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=20)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.strip().splitlines()[0]
    return f"CPU（{platform.machine()}）"


def setup(app):
    app.connect("config-inited", footer, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
