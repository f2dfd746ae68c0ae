"""Figure of the strongest pairs as a graph, with features on a circle or at their positions in the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from smoothhess.result.pairs import Pair, labels_of
from smoothhess.view import captions
from smoothhess.view.figures import canvas, image_background, image_pairs, pair_lines, title_layout
from smoothhess.view.figures.canvas import Array
from smoothhess.view.figures.feature_order import clustered

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

SLANTED = 14  # with more features on the circle, long names are rotated to the radial direction


def graph(
    result: Result,
    *,
    k: int = 20,
    names: Sequence[str] | None = None,
    over: Literal["image"] | None = None,
    q: float = 0.05,
    significant: bool = True,
    scales: Tensor | None = None,
    image: Any = None,
    cmap: str = "gray",
    example: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the significant ones of the k strongest pairs as lines between features, on a circle or over the image.

    A line is red if raising both features raises the output by more than the sum of their separate effects, and blue if
    by less. Its width grows with |effect|; it is faint if the pair is within noise (|z| < 2). The dot of a feature
    shows its gradient: red if positive, blue if negative, grey within noise; its area grows with |G_i| σ_i. On the
    circle, interacting features are adjacent, and features without a drawn pair are omitted.

    Args:
        result: The result to draw.
        k: Number of pairs.
        names: One name per feature or group. Over an image, only given names are written.
        over: "image" draws the features at their positions in the image; None draws a circle.
        q: False discovery rate at which a pair is significant, as for `Interactions.top_pairs`.
        significant: Whether to draw only significant pairs; False draws the others as well, dashed.
        scales: Scale of each feature, as for `Interactions.top_pairs`.
        image: As for kind "image", for over="image".
        cmap: Matplotlib colour map of one-channel images.
        example: Index of the example in the batch.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If `over` has another value, or the inputs are not images.

    >>> import torch, smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
    >>> graph(result, k=1, names=["age", "dose", "height"]).get_title(loc="left")
    'The strongest pair of features'
    """
    if over not in (None, "image"):
        raise ValueError(f"over must be None, for a circle, or 'image', got {over!r}.")
    one = canvas.one_example(result, example)
    labels = canvas.names_of(one, names)
    picture = image_background.picture_of(one, image, "'graph' without over") if over else None
    found = pair_lines.drawn(canvas.strongest(one, k, labels, q=q, scales=scales), significant)
    ax = canvas.new_axes(ax, 5.6, 6.2 if over else 5.3)
    things = captions.plural(captions.noun(one))
    if not found and picture is None:
        ax.set_axis_off()
        title_layout.compose(ax, f"No significant pair of {things}", captions.quality_words(one))
        return ax
    nodes = sorted({i for p in found for i in (p.i, p.j)})
    if picture is None:
        nodes, places = _circle(nodes, found)
        where = dict(zip(nodes, places, strict=True))
        _chords(ax, found, where)
        _names(ax, nodes, places, labels_of(labels, one.shape[1], one.feature_shape))
    else:
        where = dict(enumerate(picture.places))
        _over(ax, picture, found, where, cmap)
        if names is not None and labels is not None:
            _tags(ax, nodes, where, labels)
    ax.set_aspect("equal")
    ax.set_axis_off()
    dots = _dots(ax, one, nodes, where) if nodes else []
    pair_lines.legend(ax, one, found, q, 1 if title_layout.cell(ax)[0] < title_layout.NARROW else 2, dots)
    count = "strongest pair" if len(found) == 1 else f"{len(found)} strongest pairs"
    title = f"The {count} of {things}" if found else f"No significant pair of {things}"
    title_layout.compose(ax, title, captions.quality_words(one))
    return ax


def _circle(nodes: list[int], found: Sequence[Pair]) -> tuple[list[int], Array]:
    """Return the features in clockwise order from the top of the circle, and their positions."""
    number = {node: n for n, node in enumerate(nodes)}
    strength = np.zeros((len(nodes), len(nodes)))
    for p in found:
        a, b = number[p.i], number[p.j]
        strength[a, b] = strength[b, a] = abs(p.effect)
    order = [nodes[n] for n in clustered(strength)]
    angle = np.pi / 2 - 2 * np.pi * np.arange(len(order)) / len(order)
    return order, np.stack([np.cos(angle), np.sin(angle)], 1)


def _chords(ax: Axes, found: Sequence[Pair], where: dict[int, Array]) -> None:
    """Draw lines that bend towards the centre, the strongest on top."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for p, width in reversed([*zip(found, pair_lines.widths(found), strict=True)]):
        start, stop = where[p.i], where[p.j]
        # lines between neighbours bend most: a straight one would coincide with the circle
        knee = (start + stop) / 2 * (0.35 + 0.1 * np.linalg.norm(start - stop))
        path = Path(np.stack([start, knee, stop]), [Path.MOVETO, Path.CURVE3, Path.CURVE3])
        ax.add_patch(PathPatch(path, zorder=2, **pair_lines.style(p, width)))


def _names(ax: Axes, nodes: Sequence[int], places: Array, name) -> None:
    """Write names outside the circle, and set limits that leave room for them."""
    font = title_layout.small(ax)
    slanted = len(nodes) > SLANTED and max(len(name(i)) for i in nodes) > 3
    width, height = title_layout.cell(ax)
    # long names are wrapped, which leaves more room for the circle
    text = [title_layout.wrapped(name(i), (0.15 if slanted else 0.21) * width, font) for i in nodes]
    free_x, free_y = (width - 0.3) / 2, (height - 1.5) / 2
    long = max(title_layout.text_width(line, font) for t in text for line in t.split("\n")) + 0.16
    tall = long if slanted else 0.12 + 1.3 * font / 72 * max(t.count("\n") + 1 for t in text)
    radius = max(min(free_x - long, free_y - tall), 0.45)  # inches
    for (x, y), label in zip(places, text, strict=True):
        rightwards = x > -1e-9
        turn = np.degrees(np.arctan2(y, x)) + (0 if rightwards else 180) if slanted else 0.0
        side = "center" if not slanted and abs(x) < 0.15 else "left" if rightwards else "right"
        level = "center" if slanted or abs(y) < 0.9 else "bottom" if y > 0 else "top"
        ax.annotate(
            label,
            (x, y),
            (9 * x, 9 * y),
            textcoords="offset points",
            ha=side,
            va=level,
            rotation=turn,
            rotation_mode="anchor",
            fontsize=font,
            linespacing=1.0,
            multialignment=side,
            annotation_clip=False,
        ).set_in_layout(False)
    ax.set_xlim(-1 - long / radius, 1 + long / radius)
    ax.set_ylim(-1 - tall / radius, 1 + tall / radius)


def _over(
    ax: Axes, picture: image_background.Picture, found: Sequence[Pair], where: dict[int, Array], cmap: str
) -> None:
    image_background.put(ax, picture.pixels, cmap, 0.0, 0.4, "")
    image_background.outlines(ax, picture.segments, 0.0)
    for p, thickness in reversed([*zip(found, pair_lines.widths(found), strict=True)]):
        image_pairs.join(ax, np.stack([where[p.i], where[p.j]]), p, thickness, dots=False)
    height, width = picture.size
    ax.set_xlim(-0.6, width - 0.4)
    ax.set_ylim(height - 0.4, -0.6)


def _tags(ax: Axes, nodes: Sequence[int], where: dict[int, Array], labels: Sequence[str]) -> None:
    for i in nodes:
        ax.annotate(
            labels[i],
            tuple(where[i]),
            (0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=title_layout.small(ax),
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
            zorder=6,
        )


def _dots(ax: Axes, one: Result, nodes: Sequence[int], where: dict[int, Array]) -> list[Artist]:
    """Draw a dot for the gradient of each feature, and return the legend entries."""
    from matplotlib.lines import Line2D

    slope, stderr = (canvas.array(x[0]).reshape(-1)[list(nodes)] for x in (one.gradient, one.gradient_stderr))
    strength = np.abs(slope * canvas.scales_of(one)[list(nodes)])
    noise = canvas.within_noise(slope, stderr)
    colours = ["#bdbdbd" if n else c for n, c in zip(noise, canvas.sign_colours(slope), strict=True)]
    area = 18 + 60 * strength / (strength.max() or 1.0)
    x, y = np.array([where[i] for i in nodes]).T
    ax.scatter(x, y, s=area, c=colours, edgecolors="white", linewidths=0.9, zorder=5, clip_on=False)
    meant = [(canvas.POSITIVE, "positive gradient"), (canvas.NEGATIVE, "negative gradient")]
    meant.append(("#bdbdbd", "gradient within noise"))
    look = {"marker": "o", "linestyle": "none", "markeredgecolor": "white", "markersize": 6.5}
    return [Line2D([], [], color=c, label=text, **look) for c, text in meant if c in colours]  # type: ignore[arg-type]
