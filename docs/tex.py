"""Draws formulas when the site is built: pages hold outlines in place of TeX, and need no script,
font or other server.

MathML would be smaller, but browsers without a mathematical font (Chromium on Linux, Android) set
roots and sums badly.
"""

import html
import re
from xml.etree import ElementTree

import ziafont
import ziamath

_FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', re.DOTALL)
_SIZE = 16  # of the letters, in units of the outlines: what a page calls 1 em

# Plain paths: symbols that are used by name would have to have different names in every formula of
# a page.
ziamath.config.svg2 = ziafont.config.svg2 = False


def draw_formulas(page: str) -> str:
    r"""Returns a page with pictures in place of the TeX that arithmatex marks.

    Example:
      >>> draw_formulas('<span class="arithmatex">\\(x^2\\)</span>')[:60]
      '<svg class="formula" role="img" aria-label="x^2" width="'
    """
    return _FORMULA.sub(_draw, page)


def _draw(found: re.Match[str]) -> str:
    tex = html.unescape(found["tex"]).strip()[2:-2].strip()
    block = found["tag"] == "div"
    drawn = ziamath.Latex(tex, size=_SIZE, color="currentColor", inline=not block).svgxml()
    box = drawn.attrib["viewBox"]
    _, top, width, height = map(float, box.split())
    outlines = "".join(ElementTree.tostring(shape, encoding="unicode") for shape in drawn)
    picture = (
        f'<svg class="formula" role="img" aria-label="{html.escape(tex)}" '
        f'width="{width / _SIZE:.3f}em" height="{height / _SIZE:.3f}em" style="vertical-align: '
        f'{-(top + height) / _SIZE:.3f}em" '
        f'viewBox="{box}">' + re.sub(r"(\.\d\d)\d+", r"\1", outlines) + "</svg>"
        # A hundredth of a unit is not seen.
    )
    return f'<div class="formula">{picture}</div>' if block else picture
