"""Which files are tried, what they are called, and how arrays are written beside them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.spec.targets import TARGET_NAMES

# Name in the table -> entry of the zoo; with a cache: a folder.
MODELS: Final = {
    "Qwen3": "qwen3",
    "Qwen3 with a cache": "examples/byte_qwen3",
    "Gemma 3": "gemma3_text",
    "OLMo 2": "olmo2",
    "ViT with L2 norm and temperature": "h_cosine_tau_per_head",
    "Swin v2": "swinv2",
    "Llama 4": "llama4_text",
}
DTYPES: Final[tuple[Dtype, ...]] = ("float32", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file in a folder: `path` is its name without .onnx; the cases lie in `cases`.json."""

    model: str
    target: str
    dtype: Dtype

    @property
    def cases(self) -> str:
        """Name of the file with inputs and outputs, without .json."""
        return f"{MODELS[self.model].replace('/', '_')}.{self.dtype}"

    @property
    def path(self) -> str:
        """Name of the model file, without .onnx."""
        return f"{self.cases}.{self.target}"


def all_files(models: Sequence[str] = tuple(MODELS)) -> Iterator[ModelFile]:
    """Every file, in the order of the table."""
    for target in TARGET_NAMES:
        for model in models:
            for dtype in DTYPES:
                yield ModelFile(model=model, target=target, dtype=dtype)


def encoded(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """An array as JSON."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def decoded(stored: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The array of `encoded`."""
    return np.frombuffer(base64.b64decode(stored["data"]), stored["dtype"]).reshape(stored["shape"])
