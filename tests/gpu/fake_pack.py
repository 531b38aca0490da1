"""A kernel pack without compiled code: everything about it is real except the content of the image files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from qknorm_onnx.custom_ops import pack_identity
from qknorm_onnx.custom_ops.kernels.cuda.compile_image import CompiledImage
from qknorm_onnx.custom_ops.kernels.cuda.image_set import Image, all_images
from qknorm_onnx.custom_ops.kernels.cuda.kernel_pack import write_pack

SHARED = {"prefill": 131072, "decode": 71680, "combine": 2048}


def fake_image(image: Image, capability: int) -> CompiledImage:
    """An image whose code is its name."""
    tile = image.tile(capability)
    text = f"{image.name} sm_{capability}"
    return CompiledImage(
        image=image,
        capability=capability,
        cubin=text.encode() + b"\0",
        ptx=f"{text} ptx",
        entry=image.kernel,
        warps=tile.warps,
        shared=SHARED.get(image.kernel, 0),
    )


def write_fake_pack(folder: pathlib.Path, *, capabilities: Sequence[int]) -> None:
    """Writes the pack of all images."""
    write_pack(
        folder, (fake_image(image, capability) for capability in capabilities for image in all_images()), identity=pack_identity()
    )


def images_by_content(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries by the content of their files, with `names`, `types` and `divisors` of their parameters."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    found = {}
    for entry in manifest["images"]:
        names, types, divisors = zip(*manifest["parameter_lists"][entry["parameters"]], strict=True)
        content = (folder / entry["file"]).read_bytes().rstrip(b"\0").decode()
        found[content] = {**entry, "names": names, "types": types, "divisors": divisors}
    return found
