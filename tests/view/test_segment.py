"""The interactions of one segment with the others."""

import numpy as np
import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import view
from smoothhess.view.figures import canvas
from smoothhess.view.report.payload import PageOptions, payload
from tests.view.pictures import line_segments, picture, segments, unbiased_noise

pytestmark = pytest.mark.usefixtures("plain_figures")

NAMES = ["sky", "sun", "sea", "sand"]


@pytest.fixture(scope="module")
def grouped():
    return picture((3, 4, 5), 400).groups(segments())


@pytest.mark.parametrize("example", [0, 1])
@pytest.mark.parametrize("source", [0, 3, "sea"])
def test_segments_carry_their_interaction_with_the_source(grouped, source, example):
    shown = view.segment(grouped, source=source, names=NAMES, example=example).images[-1]
    index = NAMES.index(source) if isinstance(source, str) else source
    mask = segments()[0].numpy()
    row = grouped.hessian[example, index].numpy().copy()
    values = np.ma.asarray(shown.get_array())
    np.testing.assert_array_equal(np.ma.getmaskarray(values), mask == index)
    np.testing.assert_allclose(values.compressed(), row[mask][mask != index], rtol=1e-9)
    row[index] = 0
    assert shown.get_clim() == pytest.approx((-np.abs(row).max(), np.abs(row).max()))
    found = grouped[example].row(index)
    faint = unbiased_noise(found.value[0].numpy(), found.stderr[0].numpy())
    np.testing.assert_array_equal(
        (np.asarray(shown.get_alpha()) == canvas.FAINT)[mask != index], faint[mask][mask != index]
    )


def test_the_source_is_outlined_beside_and_on_the_map(grouped):
    ax = view.segment(grouped, source=3)  # the right end of the last two rows
    outlines = [s for s in line_segments(ax) if len(s) == 6]
    assert len(outlines) == 4  # white and black, in both pictures
    around = {tuple(map(tuple, side)) for side in np.sort(outlines[0], axis=1)}
    expected = {((3.5, 1.5), (3.5, 2.5)), ((3.5, 2.5), (3.5, 3.5)), ((4.5, 1.5), (4.5, 2.5)), ((4.5, 2.5), (4.5, 3.5))}
    assert around == expected | {((3.5, 1.5), (4.5, 1.5)), ((3.5, 3.5), (4.5, 3.5))}
    assert len([s for s in line_segments(view.segment(grouped, source=3, beside=False)) if len(s) == 6]) == 2


def test_without_a_source_the_strongest_is_taken(grouped):
    strength = grouped.hessian[0].clone().fill_diagonal_(0).norm(dim=1)  # all segments have the same σ
    title = view.segment(grouped, names=NAMES).get_title(loc="left")
    assert title == f"What acts together with {NAMES[int(strength.argmax())]} (outlined)"


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5)])
def test_pixels_are_found_by_place_or_number(shape):
    result = picture(shape)
    place = (2, 3) if len(shape) == 2 else (0, 2, 3)
    by_place, by_number = (view.segment(result, source=s).images[-1].get_array() for s in (place, 13))
    np.testing.assert_array_equal(by_place.filled(0), by_number.filled(0))
    row = result.hessian[0, 13].reshape(4, 5).numpy().copy()
    row[2, 3] = 0
    np.testing.assert_allclose(by_place.filled(0), row, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (4, "source 4 is not among the 4 features"),
        ((0, 0), r"source \(0, 0\) is not among"),
        (1.5, "source 1.5 is not among"),
        ("moon", "no feature named 'moon': names are sky, sun, sea, sand"),
    ],
)
def test_sources_that_are_not_there_are_refused(grouped, source, message):
    with pytest.raises(ValueError, match=message):
        view.segment(grouped, source=source, names=NAMES)


def test_pixels_with_channels_and_groups_of_channels_are_refused_with_advice():
    colour = picture((3, 4, 5), 40)
    with pytest.raises(ValueError, match=r"several channels each.*result.groups\(mask\)"):
        view.segment(colour)
    channels = colour.groups(torch.arange(3)[:, None, None].expand(3, 4, 5))
    with pytest.raises(ValueError, match="differ between channels"):
        view.segment(channels)


class Patches(nn.Module):
    """The 2 × 2 patches of images (N, 3, 4, 6) as vectors, (N, 6, 12)."""

    def forward(self, images):
        return nn.functional.unfold(images, 2, stride=2).mT


IMAGES = torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["gates", "embedding", "groups"])
def patches(request):
    layer, options = Patches(), {"space": "embedding"} if request.param == "embedding" else {}
    if request.param == "groups":
        options = {"feature_mask": torch.tensor([0, 1, 2, 0, 1, 2])}
    product = lambda images: (e := layer(images).sum(2))[:, 1] * e[:, 5] + e.square().sum(1)
    return sh.TokenSmoothHess(product, layer, "zero").attribute(IMAGES, sigma=0.1, n_calls=200, **options)


def test_patches_are_segments_of_their_image(patches):
    d = patches.shape[1]
    shown = np.ma.asarray(view.segment(patches, source=1, image=IMAGES[0]).images[-1].get_array())
    of = np.array([[0, 0, 1, 1, 2, 2]] * 2 + [[3, 3, 4, 4, 5, 5]] * 2) % d
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), of == 1)
    row = patches.unshrunk().hessian[0, 1].numpy()
    np.testing.assert_allclose(shown.compressed(), row[of][of != 1], rtol=1e-4, atol=1e-5)
    larger = IMAGES[0].repeat_interleave(3, 1).repeat_interleave(3, 2)  # the same patches in another resolution
    assert view.segment(patches, source=1, image=larger).images[-1].get_array().shape == (12, 18)
    for ax in (patches.plot("image", image=IMAGES[0]), patches.plot("graph", over="image", image=IMAGES[0])):
        assert ax.images[-1].get_array().shape == (4, 6, 3)


def test_patches_without_a_fitting_image_are_refused(patches):
    with pytest.raises(ValueError, match="Pass image=, the picture of the patches"):
        view.segment(patches)
    with pytest.raises(ValueError, match="5 × 6 pixels cannot be divided into 6 square patches"):
        view.segment(patches, image=torch.rand(5, 6))
    with pytest.raises(ValueError, match="finite numbers"):
        view.segment(patches, image=torch.rand(2, 4, 6))


def test_another_picture_has_the_size_of_the_inputs():
    result = picture((4, 5))
    other = view.image(result, image=np.zeros((4, 5, 3), dtype=np.uint8)).images[0].get_array()
    assert other.shape == (4, 5, 3)
    with pytest.raises(ValueError, match="height and width of the inputs"):
        view.image(result, image=torch.rand(8, 10))


def test_the_page_of_patches_shows_the_image(patches):
    page = payload(patches, PageOptions(image=IMAGES))
    assert page["kind"] == "image"
    assert page["word"] == ("patch" if patches.shape[1] == 6 else "group")
    assert page["examples"][1]["size"] == [4, 6]
    assert page["gates"]
    assert payload(patches, PageOptions())["kind"] == "table"
    with pytest.raises(ValueError, match="kind='image' for patches, with image=pixels"):
        payload(patches, PageOptions(kind="image"))
