"""Random augmentation of image batches (B, 3, H, W) in [0, 1], in torch.

Each function draws from the given generator, one draw for each image, and returns a new tensor.
"""

import torch
from torch import Generator, Tensor
from torch.nn import functional

__all__ = ["colour_jitter", "flip", "grayscale", "paper_augmentation", "resized_crop"]

_LUMA = (0.299, 0.587, 0.114)


def flip(images: Tensor, generator: Generator, p: float = 0.5) -> Tensor:
    """Mirror left and right with probability `p`."""
    return torch.where(_chosen(images, generator, p), images.flip(-1), images)


def grayscale(images: Tensor, generator: Generator, p: float = 0.2) -> Tensor:
    """Remove the colour with probability `p`."""
    return torch.where(_chosen(images, generator, p), _gray(images).expand_as(images), images)


def colour_jitter(
    images: Tensor,
    generator: Generator,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.1,
    p: float = 0.8,
) -> Tensor:
    """Change brightness, contrast, saturation and hue with probability `p`, in an order drawn for the batch.

    The first three are mixed with black, with the mean gray and with the gray of each pixel by a factor within
    1 ± the given width; hue is rotated by up to ± `hue` of the circle.
    """
    changed = images
    for step in torch.randperm(4, generator=generator).tolist():
        if step == 3:
            changed = _turn_hue(changed, _uniform(images, generator, -hue, hue))
            continue
        width = (brightness, contrast, saturation)[step]
        factor = _uniform(images, generator, 1 - width, 1 + width)
        gray = _gray(changed)
        other = (torch.zeros_like(gray), gray.mean((-2, -1), keepdim=True), gray)[step]
        changed = (factor * changed + (1 - factor) * other).clamp(0, 1)
    return torch.where(_chosen(images, generator, p), changed, images)


def resized_crop(
    images: Tensor, generator: Generator, area: tuple[float, float] = (0.08, 1.0), ratio: float = 4 / 3
) -> Tensor:
    """Cut a window of a share of the area within `area`, sides within 1 : `ratio`, and stretch it to full size."""
    share = _uniform(images, generator, *area).flatten()
    log_ratio = torch.log(torch.tensor(ratio)).item()
    stretch = torch.exp(_uniform(images, generator, -log_ratio, log_ratio).flatten() / 2)
    width, height = ((share.sqrt() * side).clamp(max=1) for side in (stretch, 1 / stretch))
    zero = torch.zeros_like(width)
    left, top = ((1 - size) * _uniform(images, generator, -1, 1).flatten() for size in (width, height))
    rows = torch.stack([torch.stack([width, zero, left], -1), torch.stack([zero, height, top], -1)], -2)
    grid = functional.affine_grid(rows, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False).clamp(0, 1)


def paper_augmentation(images: Tensor, generator: Generator) -> Tensor:
    """The paper's CIFAR10 recipe: flip p .5, colour jitter p .8, grayscale p .2."""
    return grayscale(colour_jitter(flip(images, generator), generator), generator)


def _uniform(images: Tensor, generator: Generator, low: float, high: float) -> Tensor:
    draws = torch.rand(len(images), 1, 1, 1, generator=generator)  # on the CPU: the same numbers on every device
    return (low + (high - low) * draws).to(images, non_blocking=True)


def _chosen(images: Tensor, generator: Generator, p: float) -> Tensor:
    return _uniform(images, generator, 0, 1) < p


def _gray(images: Tensor) -> Tensor:
    weights = torch.tensor(_LUMA).to(images, non_blocking=True).reshape(3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def _turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Shift the hue of HSV by `turn` (B, 1, 1, 1), keeping value and chroma of each pixel."""
    red, green, blue = images.split(1, dim=1)
    value, low = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    chroma = value - low
    span = chroma.clamp(min=1e-8)
    sector = torch.where(
        value == red,
        (green - blue) / span,
        torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span),
    )
    sector = sector + 6 * turn
    # A channel is full within one sixth of the circle around its hue and empty beyond two sixths.
    shift = torch.tensor([5.0, 3.0, 1.0]).to(images, non_blocking=True).reshape(3, 1, 1)
    distance = (shift + sector) % 6
    return value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1)
