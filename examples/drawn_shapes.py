"""Pictures to learn from: eight shapes drawn by formulas, anywhere in a small grey image, and a judge that tells them apart.

A picture is float32, `(1, height, width)`, -1 for black and 1 for white.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHAPES = ("disc", "ring", "square", "frame", "triangle", "plus", "cross", "diamond")
SIZE = 16
SMALLEST, LARGEST = 4.5, 6.5  # radii in pixels


def distances(shape: str, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """How far each place is outside of the shape's edge, in pixels, negative inside; x, y count from its middle, y downwards."""
    across, down = x.abs(), y.abs()
    match shape:
        case "disc":
            return torch.hypot(x, y) - radius
        case "ring":
            return (torch.hypot(x, y) - 0.8 * radius).abs() - 1
        case "square":
            return torch.maximum(across, down) - 0.85 * radius
        case "frame":
            return (torch.maximum(across, down) - 0.8 * radius).abs() - 1
        case "triangle":
            return torch.maximum(y, 0.866 * across - 0.5 * y) - 0.5 * radius
        case "plus":
            return torch.minimum(torch.maximum(across - 1.2, down - radius), torch.maximum(down - 1.2, across - radius))
        case "cross":
            return distances("plus", (x + y) * 0.7071, (x - y) * 0.7071, radius)
        case "diamond":
            return (across + down - radius) * 0.7071
    raise ValueError(f"no shape is called {shape!r}; there are {', '.join(SHAPES)}")


def draw(shape: str, places: torch.Tensor, height: int = SIZE, width: int = SIZE) -> torch.Tensor:
    """One picture, `(1, height, width)`, for each row (row of the middle, column of the middle, radius) of `places`."""
    middle_y, middle_x, radius = (column[:, None, None] for column in places.unbind(-1))
    y = torch.arange(height)[:, None] - middle_y
    x = torch.arange(width) - middle_x
    inside = (0.5 - distances(shape, x, y, radius)).clamp(0, 1)
    return (2 * inside - 1)[:, None]


def random_pictures(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures `(count, 1, SIZE, SIZE)` of random shapes in random places and sizes, and the shapes' numbers `(count,)` int64."""
    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    radius = SMALLEST + (LARGEST - SMALLEST) * torch.rand(count, 1, generator=generator)
    middles = radius + (SIZE - 1 - 2 * radius) * torch.rand(count, 2, generator=generator)  # the whole shape is in the picture
    places = torch.cat([middles, radius], dim=-1)
    pictures = torch.empty(count, 1, SIZE, SIZE)
    for number, shape in enumerate(SHAPES):
        pictures[labels == number] = draw(shape, places[labels == number])
    return pictures, labels


@dataclass(frozen=True)
class Judge:
    """Names the shape in a picture by the nearest of many drawn ones: `templates` (T, pixels) show the shapes `labels` (T,)."""

    templates: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def make(cls) -> Judge:
        """Every shape in steps of half a pixel of its place and radius."""
        drawn = {number: draw(shape, _all_places()).flatten(1) for number, shape in enumerate(SHAPES)}
        labels = torch.cat([torch.full((len(pictures),), number) for number, pictures in drawn.items()])
        return cls(torch.cat(list(drawn.values())), labels)

    def shapes_in(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The shape that each picture `(count, 1, SIZE, SIZE)` shows, and how far off it is: root mean square of its pixels."""
        nearest = torch.cdist(pictures.flatten(1), self.templates).min(dim=1)
        return self.labels[nearest.indices], nearest.values / self.templates.shape[1] ** 0.5


def _all_places() -> torch.Tensor:
    """Rows (row of the middle, column of the middle, radius) in steps of half a pixel, wherever the shape fits."""
    rows = []
    for radius in torch.arange(SMALLEST, LARGEST + 0.25, 0.5):
        steps = torch.arange(float(radius), SIZE - 1 - float(radius) + 0.01, 0.5)
        rows.append(torch.cartesian_prod(steps, steps, radius[None]))
    return torch.cat(rows)
