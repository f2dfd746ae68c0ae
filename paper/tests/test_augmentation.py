import pytest
import torch
from torch import Generator

from paper.augmentation import _turn_hue, colour_jitter, flip, grayscale, paper_augmentation, resized_crop


def batch(n=400):
    return torch.rand(n, 3, 8, 8, generator=Generator().manual_seed(0))


def share_changed(images, changed):
    return (images != changed).flatten(1).any(1).float().mean().item()


@pytest.mark.parametrize(
    ("change", "p"), [(flip, 0.5), (grayscale, 0.2), (colour_jitter, 0.8)], ids=["flip", "gray", "jitter"]
)
def test_images_are_chosen_one_by_one_with_the_stated_probability(change, p):
    images = batch()
    changed = change(images, Generator().manual_seed(1))
    assert abs(share_changed(images, changed) - p) < 4 * (p * (1 - p) / len(images)) ** 0.5
    assert torch.equal(change(images, Generator().manual_seed(1)), changed)
    assert torch.equal(change(images, Generator().manual_seed(1), p=0.0), images)


@pytest.mark.parametrize("change", [colour_jitter, resized_crop, paper_augmentation])
def test_range_shape_and_the_callers_tensor(change):
    images = batch(20)
    kept = images.clone()
    changed = change(images, Generator().manual_seed(2))
    assert changed.shape == images.shape
    assert changed.dtype == torch.float32
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert torch.equal(images, kept)


def test_flip_and_grayscale_do_what_they_say():
    images = batch(3)
    assert torch.equal(flip(images, Generator(), p=1.0), images.flip(-1))
    gray = grayscale(images, Generator(), p=1.0)
    assert torch.equal(gray[:, 0], gray[:, 2])
    torch.testing.assert_close(grayscale(gray, Generator(), p=1.0), gray)


def test_jitter_of_width_zero_is_the_identity():
    images = batch(5)
    torch.testing.assert_close(colour_jitter(images, Generator(), 0, 0, 0, 0, p=1.0), images)


def test_hue_turns_as_in_hsv():
    import colorsys

    images = batch(4)
    turn = torch.tensor([0.1, -0.1, 0.37, 1.0]).reshape(4, 1, 1, 1)
    turned = _turn_hue(images, turn)
    for i in range(4):
        for pixel, got in zip(images[i].flatten(1).T, turned[i].flatten(1).T, strict=True):
            h, s, v = colorsys.rgb_to_hsv(*pixel.tolist())
            expected = colorsys.hsv_to_rgb((h + turn[i].item()) % 1, s, v)
            torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_crop_of_everything_is_the_identity_and_windows_lie_inside():
    images = batch(6)
    torch.testing.assert_close(resized_crop(images, Generator(), area=(1.0, 1.0), ratio=1.0), images)
    ramp = torch.linspace(0, 1, 32).expand(200, 3, 32, 32)
    cropped = resized_crop(ramp, Generator().manual_seed(3), area=(0.25, 0.25), ratio=1.0)[:, 0, 0]
    slopes = (cropped[:, 20] - cropped[:, 11]) / (ramp[0, 0, 0, 20] - ramp[0, 0, 0, 11])
    torch.testing.assert_close(slopes, torch.full((200,), 0.5), rtol=1e-3, atol=1e-3)  # half of each side
    middle = cropped[:, 15:17].mean(1)
    assert middle.min() >= 0.24
    assert middle.max() <= 0.76
    assert middle.std() > 0.1
