"""The colours of plots: each kind of thing has its own palette, so that a colour means one thing on a page.

Tiers have an order, so their palette is sequential: from dark violet, the largest, to pink. Methods, networks and terms
have no order, so their palette is categorical, and without violet. Measures and marks are grey or ink; hatching and
symbols tell them apart. Runs have dashes in place of colours.

The colours of a palette can be told apart with any kind of colour blindness, which a test computes. Each colour has a
twin for dark pages.
"""

_TIERS = {
    "#1b1268": "#e3eaff",
    "#31187c": "#d8d8ff",
    "#4a1e8e": "#d0c5fa",
    "#63259b": "#ccb2f0",
    "#7e2ea3": "#c99ee3",
    "#983aa8": "#c889d2",
    "#b047a8": "#c674be",
    "#c758a7": "#c45ea7",
    "#da6aa6": "#c2468c",
    "#eb7ea6": "#bd2a6e",
}
_CATEGORIES = {
    "#0083b8": "#008edd",
    "#ee8100": "#f09700",
    "#00bb96": "#74f9d7",
    "#634000": "#ffe03c",
    "#004a81": "#88bfff",
    "#a45f52": "#be6d58",
}
_GREYS = {"#222222": "#f0f0f0", "#5f5f5f": "#8c9096", "#b8b8b8": "#c9ccd1", "#888888": "#9a9a9a"}

TIERS, CATEGORIES = tuple(_TIERS), tuple(_CATEGORIES)
INK, MEASURE, SECOND_MEASURE, NEUTRAL = _GREYS  # marks and reference lines; bars of two measures; unknown tiers
MEASURES = (MEASURE, SECOND_MEASURE)  # such as communication and computation; the second is hatched
DARK_TWINS = _TIERS | _CATEGORIES | _GREYS  # the colour on a light page → the colour on a dark page


def tier_palette(count: int) -> list[str]:
    """Return colours for tiers, largest first: as far apart as their number allows."""
    if count > len(TIERS):
        return [TIERS[place % len(TIERS)] for place in range(count)]
    distance = (len(TIERS) - 1) / max(1, count - 1)
    return [TIERS[round(place * distance)] for place in range(count)]


def category_look(number: int) -> tuple[str, int]:
    """Return colour and dash of the n-th of several names. If there are more names than colours, dashes differ."""
    return CATEGORIES[number % len(CATEGORIES)], number // len(CATEGORIES)


def css_variable(colour: str) -> str:
    """Return the name of the CSS variable that holds a colour's dark twin on dark pages."""
    return f"--c{colour.removeprefix('#')}"


def dark_twins_css() -> str:
    """Return the rules that give a dark page its colours. On paper, pages are light."""
    variables = "; ".join(f"{css_variable(colour)}: {twin}" for colour, twin in DARK_TWINS.items())
    return f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables} }} }}\n"
