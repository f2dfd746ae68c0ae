"""Layout of titles, captions, axis labels and colour bars: text is wrapped to the available width.

The wording belongs to `smoothhess.view.captions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from smoothhess.view.figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


NARROW = 4.2  # inches; narrower figures are laid out for one column of a journal


_CAPTION = "smoothhess-caption"  # gid that identifies the caption


def cell(ax: Axes) -> tuple[float, float]:
    """Return width and height in inches of the grid cell of these Axes, labels included."""
    figure, dpi = ax.figure, ax.figure.dpi
    width, height = figure.bbox.width / dpi, figure.bbox.height / dpi
    place = ax.get_subplotspec()
    if place is None:  # placed manually, or inset Axes
        return ax.bbox.width / dpi, ax.bbox.height / dpi
    grid = place.get_gridspec()
    across, down = (np.asarray(r, dtype=float) for r in (grid.get_width_ratios(), grid.get_height_ratios()))
    share_x = across[place.colspan.start : place.colspan.stop].sum() / across.sum()
    share_y = down[place.rowspan.start : place.rowspan.stop].sum() / down.sum()
    return float(width * share_x), float(height * share_y)


def small(ax: Axes) -> float:
    """Return the font size in points of tick labels, legends and captions."""
    if ax.figure.bbox.width / ax.figure.dpi < NARROW:
        return 6.5
    return 7.3 if cell(ax)[0] < NARROW else 8.3


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Return the width of one line of text in inches, with a margin of 5 % for font hinting."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath="$" in text)[0]
    return 1.05 * width / 72


def wrapped(text: str, inches: float, size: float) -> str:
    """Wrap the text to lines of at most this width; words are not split."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if line and text_width(longer, size) > inches:
                lines.append(line.strip())
                longer = word
            line = longer
        lines.append(line.strip())
    return "\n".join(lines)


def balanced(text: str, inches: float, size: float) -> str:
    """Wrap centred text to the same number of lines as `wrapped`, of about equal length."""
    fitted = wrapped(text, inches, size)
    lines = fitted.count("\n")
    while lines and wrapped(text, inches := 0.95 * inches, size).count("\n") == lines:
        fitted = wrapped(text, inches, size)
    return fitted


def compose(ax: Axes, title: str, caption: str = "", below: Sequence[str] = ()) -> None:
    """Write title, caption and the paragraphs `below` the Axes, wrapped to the space left by the drawn artists."""
    _draft(ax, title, caption)
    if below:
        _write_below(ax, below, 0.7 * cell(ax)[0])
    _settle(ax)
    if below:
        _write_below(ax, below, _room_below(ax))
    _write_above(ax, title, caption, *_span(ax))


def colour_bar(ax: Axes, mappable: Any, sentence: str, unit: str, heads: Mapping[Axes, tuple[str, str]]) -> None:
    """Add a colour bar with a label for its two ends: to the right of the Axes, or below them in a narrow figure.

    `heads` maps each of the Axes that share the bar, including `ax`, to its title and caption.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    size = small(ax)
    below = sum(cell(each)[0] for each in heads) < NARROW
    place = {"location": "bottom", "aspect": 32, "pad": 0.04} if below else {"location": "right", "pad": 0.03}
    bar = ax.figure.colorbar(mappable, ax=list(heads), fraction=0.046, **place)  # type: ignore[arg-type]
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(labelsize=size, length=2, pad=2)
    bar.locator = MaxNLocator(5 if below else 8, symmetric=True, steps=[1, 2, 2.5, 5, 10])
    power = _power(float(mappable.get_clim()[1]))
    bar.formatter = FuncFormatter(lambda x, _: f"{x / 10.0**power:g}".replace("-", "−"))
    bar.update_ticks()
    if power:
        unit = f"{unit}, ×\u00a0$10^{{{power}}}$" if unit else f"×\u00a0$10^{{{power}}}$"

    def write(room: float) -> None:
        label = "\n".join(balanced(text, max(room, 1.2), size) for text in (sentence, unit) if text)
        bar.set_label(label, fontsize=size, labelpad=3 if below else 5)

    write(cell(ax)[0] - 0.3 if below else 0.6 * cell(ax)[1])
    for each, head in heads.items():
        _draft(each, *head)
    _settle(ax)
    write(_room_below(ax) if below else bar.ax.get_window_extent().height / ax.figure.dpi)
    for each, head in heads.items():
        begin, end = _span(each)
        if len(heads) > 1:  # each title only above its own Axes
            box = each.get_window_extent()
            begin, end = box.x0 / each.figure.dpi, box.x1 / each.figure.dpi + 0.1
        _write_above(each, *head, begin, end)


def _settle(ax: Axes) -> None:
    """Run the layout engine of the figure, so that all positions are final."""
    root = ax.figure.canvas.figure  # also for a subfigure
    engine = root.get_layout_engine()
    if engine is not None:
        engine.execute(root)


def _span(ax: Axes) -> tuple[float, float]:
    """Return where the labels of the Axes begin and where their cell ends, in inches from the left of the figure."""
    figure, place, inside = ax.figure, ax.get_subplotspec(), ax.get_axes_locator()
    ax.apply_aspect(None if inside is None else inside(ax, None))  # pyright: ignore[reportArgumentType]
    labels = ax.yaxis.get_tightbbox() if ax.axison else None
    box, dpi = ax.get_window_extent(), figure.dpi
    begin, end = box.x0 if labels is None else min(box.x0, labels.x0), box.x1
    if place is not None:
        ratios = np.asarray(place.get_gridspec().get_width_ratios(), dtype=float)
        end = figure.bbox.x0 + figure.bbox.width * ratios[: place.colspan.stop].sum() / ratios.sum()
        begin = max(begin, end - cell(ax)[0] * dpi)
    return begin / dpi, end / dpi


def _room_below(ax: Axes) -> float:
    """Return the width in inches available for centred text below the Axes."""
    end, box, place = _span(ax)[1], ax.get_window_extent(), ax.get_subplotspec()
    room = 2 * (end - (box.x0 + box.x1) / 2 / ax.figure.dpi) - 0.1
    if place is not None and place.get_gridspec().ncols > 1:  # neighbouring Axes have labels as well
        room = min(room, 1.05 * box.width / ax.figure.dpi)
    return max(room, 1.2)


def _write_below(ax: Axes, paragraphs: Sequence[str], room: float) -> None:
    size = small(ax)
    ax.set_xlabel("\n".join(balanced(text, room, size) for text in paragraphs if text), fontsize=size)


def _draft(ax: Axes, title: str, caption: str) -> None:
    """Set a preliminary title with about the final number of lines, which the layout engine reserves space for."""
    for text in [t for t in ax.texts if t.get_gid() == _CAPTION]:
        text.remove()
    size = small(ax)
    text = wrapped("\n".join(part for part in (title, caption) if part), 0.7 * cell(ax)[0], size)
    ax.set_title(text, fontsize=size, loc="left", pad=5)


def _write_above(ax: Axes, title: str, caption: str, begin: float, end: float) -> None:
    """Write the title with the caption below it, between two positions in inches from the left of the figure."""
    from matplotlib.transforms import ScaledTranslation

    size = small(ax)
    large, room = size + 1.7, max(end - begin - 0.12, 1.0)
    indent = begin - ax.get_window_extent().x0 / ax.figure.dpi
    caption = wrapped(caption, room, size) if caption else ""
    lines = caption.count("\n") + 1 if caption and title else 0
    pad = (6 if lines else 5) + 1.34 * size * lines
    text, font, colour = (wrapped(title, room, large), large, "black") if title else (caption, size, canvas.INK)
    above = ax.set_title(text, loc="left", pad=pad, color=colour, fontsize=font)
    above.set_transform(above.get_transform() + ScaledTranslation(indent, 0, ax.figure.dpi_scale_trans))
    if lines:
        note = ax.annotate(
            caption,
            (0, 1),
            (72 * indent, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            va="bottom",
            fontsize=size,
            color=canvas.INK,
            annotation_clip=False,
            gid=_CAPTION,
        )
        note.set_in_layout(False)  # the padding of the title reserves its space


def in_powers(axis: Axis, most: int = 5) -> str:
    """Set few, short tick labels on an axis with final limits; return their common power of ten as text."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    power = _power(max(float(np.abs(axis.get_view_interval()).max()), 1e-300))
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 10.0**power:.6g}".replace("-", "−")))
    return f", ×\u00a0$10^{{{power}}}$" if power else ""


def _power(limit: float) -> int:
    """Return the common power of ten for tick labels up to `limit`."""
    power = int(np.floor(np.log10(limit)))
    return power if power < -2 or power > 3 else 0


def caption(ax: Axes, text: str) -> None:
    """Replace the title and the caption of finished Axes by `text`, in the font of a caption; the x label stays.

    For figures that are composed outside of `view.figures`, in `evaluate` and `cli`.
    """
    compose(ax, "", text)
