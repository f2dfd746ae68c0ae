"""Fig. 1: a ReLU network of two variables, piecewise linear, and the network convolved with a Gaussian of σ² = 0.3.

The paper does not state the training data of the network in its figure. Ours, with five hidden layers of eight units,
interpolates a hundred points of a surface with two maxima and two minima: few units, so that its linear pieces are
visible. The smoothed surface and its Hessian are exact, by quadrature; SmoothHess, which uses only gradients of the
network, is compared with them.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Adam
from tqdm import tqdm

from paper.cells import Cells
from paper.experiments import Outcome
from paper.experiments.plane import Trained, open_cells, trained
from paper.experiments.rings import ENTRIES
from paper.experiments.scales import Row, agreement, estimate
from paper.options import Options
from paper.tables import COLOURS, COLUMN, print_style, save_figure, write_csv, write_page
from paper.training import NESTED, Recipe, milestones
from smoothhess import SmoothHess
from smoothhess.baselines import hessian as own_hessian

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "surface"
SIGMA2 = 0.3
HALF = 2.5  # the surface is shown on [−HALF, HALF]²
WIDTHS = (2, 8, 8, 8, 8, 8, 1)
N_POINTS = 100
CENTRE = (1.0, 1.0)  # of SmoothHess's parabola in the cut
RECIPE = Recipe(
    n_steps=3_000,
    batch_size=N_POINTS,
    optimizer=Adam,
    rate=milestones(1e-2, (1_500, 2_500)),
    loss=NESTED.loss,
    score=NESTED.score,
)
# height, centre and squared width of each hill
HILLS = ((1.5, 1.0, 0.8, 1.0), (-1.2, -1.2, -0.6, 1.2), (0.9, -1.0, 1.3, 0.6), (-0.8, 0.9, -1.2, 0.7))


@dataclass(frozen=True, eq=False)
class Surface:
    """Values on a square grid, and the smoothed values and Hessians."""

    axis: Tensor  # (n,) within ± HALF
    f: Tensor  # (n, n); first index along x₁
    h: Tensor  # (n, n)
    hessian: Tensor  # (n, n, 2, 2) of h

    def index(self, coordinate: float) -> int:
        """Index of this coordinate on the axis, which must contain it, since the Hessian changes between points."""
        apart = (self.axis - coordinate).abs()
        if float(apart.amin()) > 1e-9:
            raise ValueError(f"expected a coordinate of the grid, got {coordinate}; choose a step that divides it.")
        return int(apart.argmin())

    @classmethod
    def of(cls, network: nn.Module, step: float, device: str = "cpu") -> Surface:
        """Evaluate a float64 network on a grid that extends eight σ beyond the displayed square.

        The Gaussian and its derivatives are products of those in each direction: h = W f Wᵀ, ∂₁₂h = W′ f W′ᵀ, …
        """
        sigma = math.sqrt(SIGMA2)
        reach = round((HALF + 8 * sigma) / step)
        long = torch.arange(-reach, reach + 1, dtype=torch.float64, device=device) * step
        with torch.no_grad():
            f = torch.cat([network(rows)[:, 0] for rows in torch.cartesian_prod(long, long).split(2**16)])
        f = f.reshape(len(long), len(long))
        shown = long.abs() <= HALF + step / 2
        z = (long - long[shown, None]) / sigma  # (n, long)
        weight = torch.exp(-z.square() / 2)
        weight = weight / weight.sum(1, keepdim=True)
        first, second = weight * z / sigma, weight * (z.square() - 1) / SIGMA2
        across = first @ f @ first.mT
        rows = [[second @ f @ weight.mT, across], [across, weight @ f @ second.mT]]
        hessian = torch.stack([torch.stack(row, -1) for row in rows], -2)
        return cls(long[shown], f[shown][:, shown], weight @ f @ weight.mT, hessian)


def run(options: Options) -> Outcome:
    """Surfaces of f and of smoothed f, the interaction H₁₂ over the plane, and a cut with SmoothHess's parabola."""
    n_calls, n_grid = (500, 11) if options.quick else (4_000, 21)
    folder = options.folder(NAME)
    points = HALF * (2 * torch.rand(N_POINTS, 2, generator=Generator().manual_seed(options.seed)) - 1)
    fitted = trained(NAME, hills, RECIPE, options, WIDTHS, points)
    cells = open_cells(folder, options, fitted, calls=n_calls, grid=n_grid, sigma2=SIGMA2)
    surface = Surface.of(fitted.in_double, 0.05 if options.quick else 0.025, options.device)

    rows = grid_rows(fitted, surface, cells, options, n_grid, n_calls)
    centre = centre_cell(fitted, cells, options, 10 * n_calls)
    lines = findings(rows, centre, fitted, surface, options)
    diagonal = {"SmoothHess on the diagonal (all points are in the csv)": [_shown(row) for row in rows if _on_cut(row)]}
    page = write_page(folder / f"{NAME}.md", "Surface", options.made_by(NAME), lines, diagonal)
    files = [write_csv(rows, folder / f"{NAME}.csv"), page]
    with print_style():
        files += save_figure(figure(surface, rows, centre), folder, NAME, dpi=300)
    return Outcome(NAME, files, lines)


def hills(points: Tensor) -> Tensor:
    """Two hills and two hollows.

    >>> hills(torch.tensor([[1.0, 0.8], [9.0, 9.0]])).round(decimals=2)
    tensor([1.4900, 0.0000])
    """
    x1, x2 = points.unbind(-1)
    parts = [a * torch.exp(-((x1 - u).square() + (x2 - v).square()) / w) for a, u, v, w in HILLS]
    return torch.stack(parts).sum(0)


def grid_rows(
    fitted: Trained, surface: Surface, cells: Cells, options: Options, n_grid: int, n_calls: int
) -> list[Row]:
    """SmoothHess at the points of a coarse grid, with the exact Hessian of h."""
    axis = torch.linspace(-HALF, HALF, n_grid, dtype=torch.float64)
    rows: list[Row] = []
    for k, x1 in enumerate(tqdm(axis.tolist(), desc="SmoothHess", disable=not options.show_progress)):

        def estimate(k: int = k, x1: float = x1) -> dict[str, Any]:
            x = torch.stack([torch.full_like(axis, x1), axis], -1).float().to(options.device)
            # separate draws for each point, so that the errors are independent
            seeds = [10_000 * options.seed + k * n_grid + j for j in range(n_grid)]
            result = SmoothHess(fitted.network).attribute(x, 0, sigma=math.sqrt(SIGMA2), n_calls=n_calls, seed=seeds)
            return {"hessian": result.hessian.tolist(), "stderr": result.stderr().tolist()}

        found = cells.compute({"x1": k}, estimate)
        for j, x2 in enumerate(axis.tolist()):
            at = surface.index(x1), surface.index(x2)
            row: Row = {"x₁": x1, "x₂": x2}
            for name, (a, b) in ENTRIES.items():
                row[name] = found["hessian"][j][a][b]
                row[f"{name} standard error"] = found["stderr"][j][a][b]
                row[f"{name} exact"] = float(surface.hessian[at[0], at[1], a, b])
            rows.append(row)
    return rows


def centre_cell(fitted: Trained, cells: Cells, options: Options, n_calls: int) -> dict[str, Any]:
    """Value, gradient and Hessian of the smoothed network at `CENTRE`, by SmoothHess."""

    def estimate() -> dict[str, Any]:
        x = torch.tensor([CENTRE], device=options.device)
        result = SmoothHess(fitted.network).attribute(x, 0, sigma=math.sqrt(SIGMA2), n_calls=n_calls, seed=options.seed)
        return {
            "value": float(result.value[0]),
            "gradient": result.gradient[0].tolist(),
            "hessian": result.hessian[0].tolist(),
        }

    return cells.compute({"centre": n_calls}, estimate)


def findings(rows: list[Row], centre: dict[str, Any], fitted: Trained, surface: Surface, options: Options) -> list[str]:
    """Summarise the figure in numbers."""
    anywhere = torch.tensor([[row["x₁"], row["x₂"]] for row in rows], dtype=torch.float64, device=options.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning that it is zero everywhere, which is reported below
        flat = own_hessian(fitted.in_double, anywhere, 0).hessian.abs().amax()
    exact = surface.hessian[tuple(surface.index(value) for value in CENTRE)]
    words = ", ".join(
        f"{name} {centre['hessian'][i][j]:+.3f} ({float(exact[i, j]):+.3f})" for name, (i, j) in ENTRIES.items()
    )
    return [
        f"network: {'-'.join(map(str, WIDTHS))}, {fitted.words} at {N_POINTS} points",
        f"largest entry of the network's own Hessian at {len(rows)} points: {float(flat):g}",
        f"SmoothHess at {CENTRE}, σ² = {SIGMA2:g} (exact in brackets): {words}",
        agreement(rows, "exact", reach=1.96),
    ]


def _on_cut(row: Row) -> bool:
    return row["x₁"] == row["x₂"]


def _shown(row: Row) -> Row:
    shown: Row = {"x₁ = x₂": row["x₁"]}
    for name in ENTRIES:
        shown |= {name: estimate(row, name), f"{name} exact": f"{row[f'{name} exact']:.3f}"}
    return shown


def figure(surface: Surface, rows: list[Row], centre: dict[str, Any]) -> Figure:
    """(a) f, (b) h, (c) H₁₂ of h over the plane, (d) a cut along the diagonal."""
    from matplotlib.figure import Figure

    from smoothhess.view.figures.canvas import DIVERGING, INK, array

    drawn = Figure(figsize=(COLUMN, 3.45))  # placed manually: layout engines keep the wide margins of 3-D axes
    x, f = array(surface.axis), array(surface.f)
    for left, values, title in ((-0.025, surface.f, "(a)  $f$"), (0.46, surface.h, "(b)  $h = f * N(0, 0.3\\,I)$")):
        _draw_surface(drawn.add_axes((left, 0.49, 0.5, 0.5), projection="3d"), x, array(values), abs(f).max())
        drawn.text(left + 0.045, 0.955, title, fontsize=8)

    ax = drawn.add_axes((0.1, 0.115, 0.3, 0.287))
    side = round(math.sqrt(len(rows)))
    estimate = torch.tensor([row["H₁₂"] for row in rows]).reshape(side, side)
    limit = float(surface.hessian[..., 0, 1].abs().amax())
    edge = HALF + HALF / (side - 1)  # points are at the centres of cells
    extent = (-edge, edge, -edge, edge)
    image = ax.imshow(array(estimate.mT), origin="lower", extent=extent, cmap=DIVERGING, vmin=-limit, vmax=limit)
    levels = [share * limit for share in (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75)]
    ax.contour(x, x, array(surface.hessian[..., 0, 1].mT), levels, colors=INK, linewidths=0.5)
    ax.set(xlabel="$x_1$", xticks=[-2, 0, 2], yticks=[-2, 0, 2])
    ax.set_ylabel("$x_2$", labelpad=-2)
    drawn.text(0.02, 0.435, "(c)  SmoothHess $H_{12}$", fontsize=8)
    drawn.colorbar(image, cax=drawn.add_axes((0.415, 0.115, 0.018, 0.287)))

    _draw_cut(drawn.add_axes((0.635, 0.115, 0.35, 0.287)), surface, centre)
    drawn.text(0.555, 0.435, "(d)  cut along $x_1 = x_2$", fontsize=8)
    return drawn


def _draw_surface(ax: Any, x: Any, values: Any, limit: float) -> None:
    """Draw a surface whose brightness depends on its slope, so that linear pieces are visible; colour shows height."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import LightSource

    from smoothhess.view.figures.canvas import DIVERGING

    every = max(1, len(x) // 125)
    x, values = x[::every], values[::every, ::every]
    bright = LightSource(azdeg=300, altdeg=40).hillshade(values.T, vert_exag=1.5, dx=x[1] - x[0], dy=x[1] - x[0]).T
    colours = colormaps[DIVERGING](values / (2 * limit) + 0.5)
    colours[..., :3] *= 0.45 + 0.55 * bright[..., None]
    first, second = np.meshgrid(x, x, indexing="ij")
    surface = ax.plot_surface(first, second, values, facecolors=colours, rstride=1, cstride=1, shade=False)
    surface.set(antialiased=False, linewidth=0, rasterized=True)
    ax.set(zlim=(-limit, limit), xticks=[-2, 0, 2], yticks=[-2, 0, 2], zticks=[-1, 0, 1])
    ax.view_init(elev=36, azim=-55)
    ax.set_box_aspect((1, 1, 0.62), zoom=0.97)
    ax.patch.set_alpha(0)
    ax.tick_params(pad=-4.5, labelsize=6.5)
    for axis, words in ((ax.xaxis, "$x_1$"), (ax.yaxis, "$x_2$")):
        axis.set_label_text(words)
        axis.labelpad = -11
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.pane.set_alpha(0)
        axis._axinfo["grid"].update(linewidth=0.3, color="0.85")


def _draw_cut(ax: Axes, surface: Surface, centre: dict[str, Any]) -> None:
    from smoothhess.view.figures.canvas import array

    x = array(surface.axis)
    gradient, hessian = torch.tensor(centre["gradient"]), torch.tensor(centre["hessian"])
    step = x - CENTRE[0]  # of both coordinates
    parabola = centre["value"] + float(gradient.sum()) * step + float(hessian.sum()) * step**2 / 2
    near = abs(step) <= 1.15
    ax.plot(x, array(surface.f.diagonal()), color=COLOURS[0], label="$f$")
    ax.plot(x, array(surface.h.diagonal()), color=COLOURS[1], label="$h$")
    ax.plot(x[near], parabola[near], color=COLOURS[2], linestyle=(0, (3, 1.2)), label="SmoothHess")
    ax.plot(CENTRE[0], centre["value"], "o", color=COLOURS[2], markersize=3)
    ax.set(xlabel="$x_1 = x_2$", xticks=[-2, 0, 2])
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.6 * (high - low))
    ax.legend(loc="upper left", handlelength=1.3, borderpad=0, labelspacing=0.15, handletextpad=0.5)
