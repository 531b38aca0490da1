"""The kernel pack: a folder with compiled images, named by their content, and `manifest.json` that says what each one is.

The launcher (`ort/cuda_pack.cc`) reads the manifest; its fields are described at `image_entry`.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

import triton

from qknorm_onnx.custom_ops.kernels.cuda.compile_image import CompiledImage, compile_image
from qknorm_onnx.custom_ops.kernels.cuda.image_set import PADDED_HEADS, Image, parameters

FIRST_EXACT: Final = 90  # from here on Triton compiles for one capability only: neither code nor PTX runs on later ones
FEATURES: Final = ("interleaved", "statistics", "capped", "masked", "hinted")


def compile_images(images: Sequence[Image], capabilities: Sequence[int], *, jobs: int) -> Iterator[CompiledImage]:
    """All images for all capabilities, in their order, compiled by `jobs` processes. Raises CompileError."""
    work = [(image, capability) for capability in capabilities for image in images]
    if jobs == 1:
        yield from (compile_image(*item) for item in work)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_image, *zip(*work, strict=True))


def write_pack(folder: pathlib.Path, compiled: Iterable[CompiledImage], *, identity: Mapping[str, object]) -> int:
    """Writes the pack to `folder` and returns its size in bytes. Files of an older pack there are removed.

    `identity` is `custom_ops.pack_identity()`: kernels know nothing of the package around them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.cubin"), *folder.glob("*.ptx")):
        old.unlink()
    lists: list[list[list[Any]]] = []
    entries: list[dict[str, Any]] = []
    built = list(compiled)
    lowest = min(each.capability for each in built)
    for each in built:
        described = [[p.name, p.type, p.divisor] for p in parameters(each.image)]
        if described not in lists:
            lists.append(described)
        number = lists.index(described)
        entries.append(image_entry(folder, each, each.cubin, "cubin", number))
        if each.capability == lowest < FIRST_EXACT and has_ptx(each.image):
            entries.append(image_entry(folder, each, each.ptx.encode() + b"\0", "ptx", number))
    manifest = {
        **identity,
        "triton": triton.__version__,
        "parameter_lists": lists,
        "images": entries,
    }
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True)
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir())


def has_ptx(image: Image) -> bool:
    """Whether the pack holds the image's PTX too, which the driver compiles for processors newer than the pack.

    For its size not of every image: of the general ones, which serve everything, and of the most common plain ones.
    """
    common = image.padded == 128 and image.dtype != "float32" and not (image.capped or image.masked)
    return not image.hinted or common or (image.kernel == "combine" and image.padded == PADDED_HEADS[-1])


def image_entry(folder: pathlib.Path, each: CompiledImage, content: bytes, form: str, parameter_list: int) -> dict[str, Any]:
    """Writes one file and describes it.

    `capability` is that of the compiled code; `exact` code runs on no other one, the rest on newer ones of the same major
    version too, and PTX on every newer one. `parameters` numbers the list of [name, type, divisor] in the order of the
    kernel's parameter block, which ends with two more pointers that are null. A launch has 32 * `warps` threads and
    `shared` bytes of dynamic shared memory.
    """
    digest = hashlib.sha256(content).hexdigest()
    name = f"{digest[:20]}.{form}"
    (folder / name).write_bytes(content)
    image, tile = each.image, each.image.tile(each.capability)
    return {
        "kernel": image.kernel,
        "dtype": image.dtype,
        "padded": image.padded,
        **{feature: int(getattr(image, feature)) for feature in FEATURES},
        "capability": each.capability,
        "exact": int(form == "cubin" and each.capability >= FIRST_EXACT),
        "form": form,
        "file": name,
        "sha256": digest,
        "bytes": len(content),
        "entry": each.entry,
        "warps": each.warps,
        "shared": each.shared,
        "rows": tile.rows,
        "constants": image.constants(each.capability),
        "parameters": parameter_list,
    }
