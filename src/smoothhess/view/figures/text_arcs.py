"""Figure of a text: its tokens in lines, coloured by one number each, with arcs between the strongest pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from smoothhess.result.pairs import Pair
from smoothhess.view import captions, token_text
from smoothhess.view.figures import canvas, pair_lines, title_layout
from smoothhess.view.figures.canvas import Array
from smoothhess.view.figures.segment_partners import interactions_with, source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

MOST_TOKENS = 1000  # maximum number of tokens on a figure
MANY_TOKENS = 120  # with more tokens, the font is smaller
PITCH, BOX = 2.5, 1.5  # distance of two lines and height of a token, in units of the font size
BAR = 110.0, 7.0, 38.0  # length and thickness of the colour bar, and the height reserved for it, in points
LUMINANCE = np.array([0.3, 0.59, 0.11])
SINGLE = 2.5  # height of arcs over a text of one line, in units of the space between two lines
SPACE, PADDING = 0.35, 0.22  # between two words, and on both sides of a token, in units of the font size


def text(
    result: Result,
    *,
    by: Literal["interactions", "gradient"] = "interactions",
    source: int | str | None = None,
    k: int = 8,
    names: Sequence[str] | None = None,
    q: float = 0.05,
    scales: Tensor | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the tokens of a text in lines, coloured by their interactions with one token, the source, or by SmoothGrad.

    Arcs connect the k strongest significant pairs of the text: red if raising both gates raises the output by more than
    the sum of their separate effects, blue if by less; their width grows with |effect|. Colours and arcs are those of
    the unbiased estimate; tokens within noise (|z| < 2) are faint. The source is outlined.

    Args:
        result: A result of `TokenSmoothHess`, or of groups of consecutive tokens.
        by: "interactions" with the source, or "gradient" for the effect of each token by itself.
        source: Index of the source, or its name if it occurs once; None takes the token with the strongest
            interactions.
        k: Maximum number of arcs.
        names: The tokens as strings; those of the result if None. Markers of sub-words ("Ġ", "▁", "##") are shown as
            spaces, or join two tokens.
        q: False discovery rate at which a pair is significant, as for `Interactions.top_pairs`.
        scales: Scale of each feature, as for `Interactions.top_pairs`.
        example: Index of the example in the batch.
        limit: The colour scale is from −limit to limit; the largest magnitude if None.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If the features are not tokens, there are more than 1 000 of them, or there is no such source.

    >>> import torch, smoothhess as sh
    >>> words = torch.nn.Embedding(9, 4)
    >>> explainer = sh.TokenSmoothHess(lambda ids: words(ids).prod(1).sum(1), words)
    >>> result = explainer.attribute(torch.tensor([[3, 1, 4]]), sigma=0.1, names=["not", "Ġso", "Ġgood"])
    >>> [label.get_text() for label in text(result).texts if label.get_gid() == "token"]
    ['not', 'so', 'good']
    """
    one = canvas.one_example(result, example)
    canvas.new_figure(1, 1)  # raises where matplotlib is missing
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    names = _names(one, names)
    tokens, labels = token_text.readable(names), token_text.labels(names)
    if by not in ("interactions", "gradient"):
        raise ValueError(f"by must be 'interactions' or 'gradient', got {by!r}.")
    canvas.check_count(k, "arcs")
    index = source_of(one, source, labels)
    if by == "interactions":
        value, faint, sampled = interactions_with(one, index)
        value[index] = 0
        title, label = (
            f"What acts together with “{_escaped(labels[index])}” (outlined)",
            captions.interaction_label(one),
        )
    else:
        value, stderr = (canvas.array(x[0]).reshape(-1) for x in (one.gradient, one.gradient_stderr))
        faint, sampled = canvas.within_noise(value, stderr), bool(stderr.any())
        title, label = f"What each {captions.noun(one)} does by itself", captions.gradient_label(one)
    noise = [captions.FAINT_WORDS] if sampled else []
    found = [p for p in one.top_pairs(k, labels, q=q, scales=scales)[0] if p.significant and p.value]
    size = 10.0 if len(tokens) <= MANY_TOKENS else 8.0
    inches = 6.4 if ax is None else title_layout.cell(ax)[0]
    width = 72 * (inches - 0.25)
    boxes, lines = _lines(tokens, size, width)
    room = (PITCH - BOX) * size * (SINGLE if lines == 1 and found else 1.0)  # above the first line
    top, end = -room - (BOX / 2 + 0.15) * size, ((lines - 1) * PITCH + BOX / 2) * size
    bottom = end + BAR[2]
    ax = canvas.new_axes(ax, inches, 0.8 + (bottom - top) / 72)
    ax.set_xlim(-1, width + 1)
    ax.set_ylim(bottom, top)
    ax.set_aspect("equal")
    ax.set_axis_off()
    scale = ScalarMappable(Normalize(-(most := canvas.symmetric_limit(value, limit)), most), canvas.DIVERGING)
    colours = scale.to_rgba(value)
    colours[faint, :3] = 1 - canvas.FAINT * (1 - colours[faint, :3])
    if by == "interactions":
        colours[index] = 1.0  # its diagonal entry is not an interaction
    drawn = _draw(ax, tokens, boxes, size, colours)
    if by == "interactions":
        drawn[index][0].set(edgecolor="black", linewidth=1.4, zorder=3.5)
    for p, thickness in reversed([*zip(found, pair_lines.widths(found), strict=True)]):  # the strongest on top
        _arc(ax, boxes, size, p, thickness, room if lines == 1 else None)
    note = "; ".join([captions.quality_words(one), _arcs_words(len(found), q), *noise])
    legend = _colour_bar(ax, scale, label, width, end)
    title_layout.compose(ax, title, note)
    ax.apply_aspect()
    shrunk = ax.get_window_extent().width / ax.figure.dpi / (inches - 0.25)  # where the Axes are smaller than planned
    for words in (legend, *(words for _, words in drawn)):
        words.set_fontsize(words.get_fontsize() * min(shrunk, 1.0))
    return ax


def _colour_bar(ax: Axes, scale: Any, label: tuple[str, str], width: float, end: float) -> Any:
    """Draw a short colour bar below the text, which ends at height `end`, and return its label, which is beside it."""
    length, thickness, _ = BAR
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    across, down = right - left, bottom - top
    bar = ax.inset_axes((2 / across, (bottom - end - 20) / down, length / across, thickness / down))
    ax.figure.colorbar(scale, cax=bar, orientation="horizontal").outline.set_visible(False)
    font = title_layout.small(ax)
    bar.tick_params(labelsize=font, length=2, pad=2)
    power = title_layout.in_powers(bar.xaxis, 4)
    room = (width - length - 16) / 72
    words = "\n".join(title_layout.wrapped(line, room, font) for line in (label[0], f"{label[1]}{power}") if line)
    return ax.text(length + 16, end + 9, words, fontsize=font, va="top")


def _arcs_words(count: int, q: float) -> str:
    if count < 2:
        return f"arc: the strongest significant pair (q ≤ {q:g})" if count else f"no significant pair (q ≤ {q:g})"
    return f"arcs: the {count} strongest significant pairs (q ≤ {q:g})"


def _names(one: Result, names: Sequence[str] | None) -> list[str]:
    """Return the tokens of a text in reading order: the given names, those of the result, or indices."""
    d = one.shape[1]
    if not captions.is_text(one):
        raise ValueError(
            "the features of this result are not the tokens of a text. Use a result of TokenSmoothHess for token ids, "
            "or kind 'heatmap', 'pairs' or 'graph'."
        )
    if d > MOST_TOKENS:
        raise ValueError(f"a figure shows at most {MOST_TOKENS} tokens, this result has {d}. Group them by sentences.")
    own = [str(i) for i in range(d)] if one.names is None else list(one.names[0])
    return canvas.check_names(names, d) or own


def _escaped(words: str) -> str:
    """Return text that Matplotlib does not read as a formula."""
    return words.replace("$", r"\$")


def _lines(tokens: Sequence[token_text.Token], size: float, width: float) -> tuple[Array, int]:
    """Return the left end, the right end and the middle height of each token in points, and the number of lines."""
    boxes, x, line = [], 0.0, 0
    for token in tokens:
        length = 72 * title_layout.text_width(_escaped(token.text), size) + 2 * PADDING * size
        gap = SPACE * size if token.gap else 0.08 * size
        if token.gap == "\n" or (x and x + gap + length > width):
            x, line, gap = 0.0, line + 1, 0.0
        left = x + (gap if x else 0.0)
        x = left + length
        boxes.append((left, min(x, width), line * PITCH * size))
    return np.array(boxes), line + 1


def _draw(
    ax: Axes, tokens: Sequence[token_text.Token], boxes: Array, size: float, colours: Array
) -> list[tuple[Any, Any]]:
    """Draw a box and the text of each token, and return both."""
    from matplotlib.patches import Rectangle

    drawn = []
    for token, (left, right, middle), colour in zip(tokens, boxes, colours, strict=True):
        box = Rectangle((left, middle - BOX * size / 2), right - left, BOX * size, facecolor=colour, zorder=3)
        box.set(edgecolor="#d9d9d9", linewidth=0.4)
        ink = "white" if colour[:3] @ LUMINANCE < 0.5 else "black"
        place = {"x": (left + right) / 2, "y": middle, "ha": "center", "va": "center_baseline"}
        drawn.append(
            (
                ax.add_patch(box),
                ax.text(s=_escaped(token.text), **place, fontsize=size, color=ink, gid="token", zorder=4),
            )
        )
    return drawn


def _arc(ax: Axes, boxes: Array, size: float, pair: Pair, width: float, room: float | None) -> None:
    """Draw an arc above a line of text between two of its tokens, or a curve from one line to another.

    `room` is the height above a text of one line.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    (x0, y0), (x1, y1) = (((left + right) / 2, middle) for left, right, middle in boxes[[pair.i, pair.j]])
    half = BOX * size / 2
    if y0 == y1:  # longer arcs are higher
        long = abs(x1 - x0)
        if room is None:
            rise = (PITCH - BOX) * size * min(1.0, 0.5 + long / (30 * size))
        else:
            rise = room * (0.2 + 0.8 * long / (boxes[-1, 1] - boxes[0, 0]))
        knees = [(x0, y0 - half - 1.3 * rise), (x1, y1 - half - 1.3 * rise)]
        points = [(x0, y0 - half), *knees, (x1, y1 - half)]
    else:  # from the lower edge of the upper token to the upper edge of the lower one
        bend = (PITCH - BOX) * size + 0.25 * (y1 - y0 - PITCH * size)
        points = [(x0, y0 + half), (x0, y0 + half + bend), (x1, y1 - half - bend), (x1, y1 - half)]
    path = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    ax.add_patch(PathPatch(path, zorder=2, **pair_lines.style(pair, width)))
