"""Plots with Chinese labels and no font asked for: text stays text in the SVG, the reader's machine draws it.

in: - -> out: matplotlib set up, by `use_chinese()` everywhere and `inline_svg()` in a notebook.
A CJK font that matplotlib finds is used to measure; without one the labels are right, spaced by guess.
"""

import logging
import warnings

CJK_FONTS = (
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "Noto Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Arial Unicode MS",
)


def use_chinese() -> str | None:
    """Set matplotlib up for Chinese labels in SVG. Returns the CJK font it measures with, or None."""
    import matplotlib
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    found = next((name for name in CJK_FONTS if name in installed), None)
    # the fonts that are not here still go into the SVG's font-family, for the machine that shows it
    matplotlib.rcParams.update(
        {
            "font.family": [
                *([found] if found else []),
                "DejaVu Sans",
                *(f for f in CJK_FONTS if f != found),
            ],
            "svg.fonttype": "none",
            "axes.unicode_minus": False,
        }
    )
    # both complaints are about measuring only: the SVG holds the characters themselves
    warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    return found


def inline_svg() -> str | None:
    """`use_chinese`, and figures of a notebook as SVG."""
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    found = use_chinese()
    set_matplotlib_formats("svg")
    return found
