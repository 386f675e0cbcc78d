"""Draw the figures with translated words, as SVGs whose text appears in the reader's own fonts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from docs._ext.compare import has_words

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "␣"  # begins a token of a sample
WIDE = re.compile("[\u3000-\u9fff\uff00-\uffef]")  # as wide as the font's W
FONTS = "'DejaVu Sans', 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"


@cache
def kit():
    """Return the figures' module, with all figures registered."""
    import dev.figures.draw  # registers the figures

    return dev.figures.kit


@contextmanager
def words_in(say: Callable[[str], str]) -> Iterator[None]:
    """Let matplotlib write ``say(text)`` for each text, with enough width for Chinese."""
    from matplotlib.backends.backend_svg import RendererSVG
    from matplotlib.text import Text

    write = Text.set_text
    measure = RendererSVG.get_text_width_height_descent

    def translated(self, text) -> None:
        is_new = isinstance(text, str) and not isinstance(text, kit().Said)
        write(self, say(text) if is_new else text)

    def measured(self, text, prop, ismath):
        return measure(self, WIDE.sub("W", text), prop, ismath)

    Text.set_text = translated
    RendererSVG.get_text_width_height_descent = measured
    kit().say = say
    try:
        yield
    finally:
        Text.set_text = write
        RendererSVG.get_text_width_height_descent = measure
        kit().say = str


def messages() -> list[str]:
    """Return the figures' titles, descriptions and words."""
    import matplotlib.pyplot as plt

    texts = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    with words_in(collect), plt.rc_context(kit().STYLE):
        for function, title, description in kit().FIGURES.values():
            plt.close(function())
            texts += [title, description]
    words = [text for text in texts if has_words(text) and not text.startswith(TOKEN)]
    return [text.replace("\n", " / ") for text in dict.fromkeys(words)]


def draw(folder: Path, translations: dict[str, str]) -> None:
    """Draw the translated figures as SVGs into a folder."""

    def say(text: str) -> str:
        if "\n" in text:
            return translations.get(text.replace("\n", " / "), text).replace(" / ", "\n")
        return translations.get(text, text)

    folder.mkdir(parents=True, exist_ok=True)
    english = dict(kit().FIGURES)
    for name, (function, title, description) in english.items():
        kit().FIGURES[name] = function, say(title), say(description)
    with words_in(say):
        for name in english:
            kit().save(name, folder, ["svg"], {"svg.fonttype": "none"})
            path = folder / f"{name}.svg"
            svg = re.sub(r"'DejaVu Sans'(?:, [^;\"]*)?(?=[;\"])", FONTS, path.read_text("utf-8"))
            path.write_text(svg, "utf-8")
    kit().FIGURES.update(english)
