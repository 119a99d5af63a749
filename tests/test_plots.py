import io
import subprocess
import sys
import warnings

import pytest


@pytest.fixture
def pyplot():
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(), warnings.catch_warnings():
        yield plt
        plt.close("all")


def svg(plt) -> str:
    figure, axes = plt.subplots()
    axes.plot([0, 1], [-1, 1])
    axes.set_xlabel("步数")
    axes.set_title("奖励")
    out = io.StringIO()
    figure.savefig(out, format="svg")
    return out.getvalue()


def test_chinese_labels_stay_text_and_name_fonts_that_the_reader_may_have(pyplot):
    from minirl.plots import use_chinese

    use_chinese()
    image = svg(pyplot)
    assert ">奖励<" in image and ">步数<" in image
    assert "Noto Sans CJK SC" in image and "Microsoft YaHei" in image
    assert "−" not in image  # the sign is a plain hyphen: CJK fonts often lack U+2212


def test_a_missing_glyph_or_font_is_not_complained_about(pyplot, caplog):
    from minirl.plots import use_chinese

    use_chinese()
    with warnings.catch_warnings(record=True) as seen:
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        svg(pyplot)
    assert [str(w.message) for w in seen] == []
    assert "findfont" not in caplog.text


def test_the_returned_font_is_installed(pyplot):
    from matplotlib import font_manager

    from minirl.plots import use_chinese

    found = use_chinese()
    assert found is None or found in {font.name for font in font_manager.fontManager.ttflist}


def test_a_notebook_shows_svg(monkeypatch, pyplot):
    import matplotlib_inline.backend_inline as inline

    from minirl.plots import inline_svg

    asked = []
    monkeypatch.setattr(inline, "set_matplotlib_formats", lambda *formats: asked.append(formats))
    inline_svg()
    assert asked == [("svg",)]


def test_importing_it_does_not_load_matplotlib():
    code = "import sys, minirl.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
