"""Gradient, diagonal and eigen-directions as maps, profiles and bars."""

import numpy as np
import pytest
import torch
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

import smoothhess as sh
from smoothhess import baselines, view
from smoothhess.view.figures import canvas
from tests.truths import OneHidden
from tests.view.pictures import (
    NAMES,
    draw,
    line_segments,
    network,
    picture,
    segments,
    table,
    unbiased_noise,
)

pytestmark = pytest.mark.usefixtures("plain_figures")

KINDS = ["gradient", "diagonal"]


def numbers(result, kind, example):
    if kind == "gradient":
        return result.gradient[example].flatten().numpy(), result.gradient_stderr[example].flatten().numpy()
    found = result.diagonal()
    return found.value[example].flatten().numpy(), found.stderr[example].flatten().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_bars_are_the_numbers_with_their_intervals(kind):
    result = table(120, design="iid", control=None)
    ax = result.plot(kind, k=4, names=NAMES, example=1)
    value, stderr = numbers(result, kind, 1)
    scales = result.gaussian.scales(6).numpy() ** (1 if kind == "gradient" else 2)
    chosen = np.argsort(-np.abs(value * scales), kind="stable")[:4]
    bars = next(c for c in ax.containers if isinstance(c, BarContainer))
    np.testing.assert_allclose([b.get_width() for b in bars], value[chosen])
    assert [t.get_text() for t in ax.get_yticklabels()] == [NAMES[i] for i in chosen]
    found = (result.gradient_estimate() if kind == "gradient" else result.diagonal()).interval()
    np.testing.assert_allclose(line_segments(ax)[0][:, :, 0].T, [end[1].numpy()[chosen] for end in found])
    weak = unbiased_noise(value, stderr)[chosen]
    assert [b.get_alpha() == canvas.FAINT for b in bars] == weak.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (3, 4, 5)])
def test_images_are_maps_with_channels_summed(kind, shape):
    result = picture(shape, 40, design="iid", control=None)
    shown = result.plot(kind, example=1).images[0]
    value, stderr = numbers(result, kind, 1)
    expected = value.reshape(-1, 4, 5).sum(0)
    np.testing.assert_allclose(np.asarray(shown.get_array()), expected, rtol=1e-9)
    if kind == "gradient" and shape[0] == 3:  # the errors of sums, as groups has them
        pixels = torch.arange(20).reshape(4, 5).expand(shape)
        stderr = result.groups(pixels).gradient_stderr[1].numpy().reshape(1, -1)
    error = stderr.reshape(-1, 4, 5).sum(0)
    z = np.abs(expected / error)
    assert ((z > 1) & (z < 2)).any()
    np.testing.assert_array_equal(np.asarray(shown.get_alpha()) == canvas.FAINT, unbiased_noise(expected, error))


@pytest.mark.parametrize("design", ["orthogonal", "iid"])
def test_sums_over_channels_have_the_errors_that_groups_of_pixels_have(design):
    from smoothhess.view.figures.gradient_map import _by_pixel

    result = picture((3, 4, 5), 90, design=design)
    value, stderr = _by_pixel(result[1])
    grouped = result.groups(torch.arange(20).reshape(4, 5).expand(3, 4, 5))[1]
    np.testing.assert_allclose(value, grouped.gradient[0].numpy(), rtol=1e-9)
    variance = grouped.noise.of_mean(grouped.estimate.features.head.even).value[0]  # without rounding and unseen events
    np.testing.assert_allclose(stderr, variance.sqrt().numpy(), rtol=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, "eigen"])
def test_segments_are_painted_over_their_pixels(kind):
    mask = segments()
    grouped = picture((3, 4, 5)).groups(mask)
    ax = grouped.plot(kind, example=1)
    shown = np.asarray(ax.images[0].get_array())
    if kind == "eigen":
        value = grouped[1].eigh(1).vectors[0, 0].numpy()
        value = value * np.sign(value[np.abs(value).argmax()])
    else:
        value, _ = numbers(grouped, kind, 1)
    np.testing.assert_allclose(shown, value[mask[0].numpy()], rtol=1e-9)
    assert ax.collections  # lines between segments


@pytest.mark.parametrize("kind", [*KINDS, "eigen"])
def test_groups_that_differ_between_channels_are_bars(kind):
    mask = torch.arange(3)[:, None, None].expand(3, 4, 5)
    grouped = picture((3, 4, 5)).groups(mask)
    ax = grouped.plot(kind, names=["red", "green", "blue"])
    assert not ax.images
    assert sorted(t.get_text() for t in ax.get_yticklabels()) == ["blue", "green", "red"]


@pytest.mark.parametrize("kind", KINDS)
def test_long_unnamed_inputs_are_profiles(kind):
    result = sh.SmoothHess(network((60,))).attribute(torch.rand(1, 60).double(), sigma=0.5, n_calls=120)
    ax = result.plot(kind)
    value, stderr = numbers(result, kind, 0)
    heights = np.array([[bar.get_height() for bar in c] for c in ax.containers])
    np.testing.assert_allclose(heights.sum(0), value, atol=1e-15)
    faint = heights[[0, 2]].sum(0) != 0  # within noise come first, of each sign
    np.testing.assert_array_equal(faint, unbiased_noise(value, stderr) & (value != 0))
    assert len(result.plot(kind, k=7).patches) == 7
    draw(ax)


# --- photos -----------------------------------------------------------------------------------------------------------


def test_photos_never_make_a_matrix_of_pixels():
    """3 × 96 × 96: a matrix of all pixels would hold 85 million numbers, of channels by pixels 250."""
    result = sh.SmoothHess(lambda x: torch.relu(x.flatten(1) - 0.1).mean(1) ** 2).attribute(
        torch.rand(1, 3, 96, 96), sigma=0.1, n_calls=8
    )
    largest = 3 * 96 * 96 * 64  # numbers
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if hasattr(t, "numel"))
            return out

    with Watch():
        for kind in ("gradient", "diagonal", "eigen"):
            assert result.plot(kind).images[0].get_array().shape == (96, 96)
    assert max(sizes) < largest
    with pytest.raises(ValueError, match=r"groups\(mask\)"):
        result.plot("pairs")
    with pytest.raises(ValueError, match=r"groups\(mask\)"):
        result.plot("heatmap")


# --- eigen ------------------------------------------------------------------------------------------------------------


def test_directions_are_those_of_eigh_up_to_their_sign():
    result = picture((4, 5))
    axes = Figure(figsize=(9, 3)).subplots(1, 3)
    assert view.eigen(result, example=1, which=[0, 2, 1], ax=list(axes)) is axes[0]
    found = result[1].eigh(3)
    for ax, i in zip(axes, (0, 2, 1), strict=True):
        shown = np.asarray(ax.images[0].get_array())
        vector = found.vectors[0, i].numpy()
        assert abs((shown * vector).sum()) == pytest.approx(1)
        assert shown.flat[np.abs(shown).argmax()] > 0
        bends = "up" if found.values[0, i] > 0 else "down"
        assert ax.get_title(loc="left").replace("\n", " ").endswith(f"direction: f bends {bends}")
        said = " ".join(t.get_text() for t in ax.texts).replace("−", "-")
        assert f"λ = {float(found.values[0, i]):+.3g}" in said
    assert len({ax.images[0].get_clim() for ax in axes}) == 1


def test_own_figure_shows_three_of_an_image_and_one_of_a_table():
    assert len([ax for ax in picture((4, 5)).plot("eigen").figure.axes if ax.images]) == 3
    result = table()
    ax = result.plot("eigen", names=NAMES, k=3)
    vector = result[0].eigh(1).vectors[0, 0].numpy()
    vector = vector * np.sign(vector[np.abs(vector).argmax()])
    widths = [bar.get_width() for bar in ax.patches]
    np.testing.assert_allclose(widths, vector[np.argsort(-np.abs(vector), kind="stable")[:3]])


def test_directions_within_noise_are_faint_as_a_whole():
    noisy = sh.SmoothHess(network((4, 5))).attribute(
        torch.rand(1, 4, 5).double(), sigma=0.5, n_calls=40, design="iid", control=None, shrink=False
    )
    axes = Figure(figsize=(9, 3)).subplots(1, 2)
    view.eigen(noisy, which=[0, 19], ax=axes)
    alpha = [set(np.asarray(ax.images[0].get_alpha()).flat) for ax in axes]
    assert alpha[1] == {canvas.FAINT}
    assert any("faint: within noise" in t.get_text().replace("\n", " ") for t in axes[1].texts)
    sure = picture((4, 5), 2000)
    assert set(np.asarray(sure.plot("eigen").images[0].get_alpha()).flat) == {1.0}


@pytest.mark.parametrize("design", ["orthogonal", "iid"])
def test_noise_of_large_results_is_found_without_a_matrix(design, monkeypatch):
    from smoothhess.view.figures import eigenvectors

    result = sh.SmoothHess(OneHidden(60)).attribute(
        torch.rand(1, 60, generator=torch.Generator().manual_seed(0)).double(),
        sigma=0.5,
        n_calls=240,
        design=design,
        control=None,
        shrink=False,
    )
    dense = eigenvectors._noise_norm(result)
    monkeypatch.setattr(canvas, "MOST_FEATURES", 10)
    free = eigenvectors._noise_norm(result)
    assert free == pytest.approx(dense, rel=0.25)
    exact = OneHidden(60).truth(result.inputs, sh.Isotropic(0.5)).hessian[0]
    assert free == pytest.approx(float(torch.linalg.matrix_norm(result.hessian[0] - exact, 2)), rel=0.35)


@pytest.mark.parametrize("which", [20, -1, [0, 20], [], "first", 0.5])
def test_directions_that_are_not_there_are_refused(which):
    with pytest.raises(ValueError, match="numbers of directions from 0 to 19"):
        picture((4, 5), 40).plot("eigen", which=which)


def test_several_directions_want_as_many_axes():
    with pytest.raises(ValueError, match="expected 2 Axes, one for each panel, got 1"):
        picture((4, 5), 40).plot("eigen", which=[0, 1], ax=Figure().add_subplot())


def test_zero_hessian_draws():
    zero = baselines.gradient(network((4, 5)), torch.rand(1, 4, 5).double())
    for kind in (*KINDS, "eigen"):
        draw(zero.plot(kind))
