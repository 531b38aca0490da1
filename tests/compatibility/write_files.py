"""Writes files as this version of the library makes them, with inputs and what PyTorch computes from them in float64.

    python tests/compatibility/write_files.py

They go to a folder named after the version, once: what a released version wrote is never written again. Later versions must
still read it (test_files_of_older_versions.py, docs/stability.md). Each model has random weights, q and k gains included.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

import qknorm_onnx as qk
from qknorm_onnx.torch_export.load import LoadedSource, load_source
from qknorm_onnx.torch_export.mends import mended

FOLDER: Final = pathlib.Path(__file__).parent
TARGETS: Final = ("custom-op", "ort", "onnx", "primitive")
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES: Final = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64} | HEADS
TEXT: Final = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | SIZES


@dataclasses.dataclass(frozen=True)
class Example:
    """A module as `export` takes it, and inputs of other sizes than the example's, by the names of the graph."""

    source: LoadedSource
    inputs: Mapping[str, torch.Tensor]


class Streams(nn.Module):
    """Two streams with norms of their own, joined before rotary-free attention: q and k are prepared apart."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleDict({f"{part}_{stream}": nn.Linear(16, 32) for part in "qkv" for stream in ("text", "image")})
        self.norm = nn.ModuleDict({name: nn.RMSNorm(8, eps=1e-6) for name in self.project if not name.startswith("v")})
        self.out = nn.Linear(32, 16)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.cat([self._heads(part, "text", text), self._heads(part, "image", image)], 1) for part in "qkv")
        y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, part: str, stream: str, x: torch.Tensor) -> torch.Tensor:
        name = f"{part}_{stream}"
        heads = self.project[name](x).unflatten(-1, (4, 8))
        return self.norm[name](heads) if name in self.norm else heads


def sliding_and_full() -> Example:
    """Gemma 3: a layer with a window of 4 keys and one without, (1 + w) norms, a scale of its own."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    model = Gemma3ForCausalLM(Gemma3TextConfig(sliding_window=4, layer_types=kinds, query_pre_attn_scalar=48, **TEXT))
    ids = torch.randint(3, 48, (3, 11))
    return Example(from_folder(model, with_past=False), {"input_ids": ids})


def with_cache() -> Example:
    """Qwen3 with the keys and values of five earlier tokens as inputs and outputs; one row is padded on the left."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    source = from_folder(Qwen3ForCausalLM(Qwen3Config(**TEXT)), with_past=True)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :2] = 0
    inputs = {"input_ids": torch.randint(3, 48, (3, 2)), "attention_mask": mask}
    inputs |= {"position_ids": torch.arange(5, 7).expand(3, 2).contiguous()}
    caches = (f"past_key_values.{layer}.{part}" for layer in range(SIZES["num_hidden_layers"]) for part in ("key", "value"))
    return Example(source, inputs | {name: torch.randn(3, HEADS["num_key_value_heads"], 5, HEADS["head_dim"]) for name in caches})


def two_streams() -> Example:
    """Attention over two streams whose queries and keys are prepared by nodes of their own."""
    axes = {"image": {0: "batch", 1: "pixels"}, "text": {0: "batch", 1: "tokens"}}
    kwargs = {"image": torch.randn(2, 6, 16), "text": torch.randn(2, 3, 16)}
    source = LoadedSource(module=randomised(Streams()).eval(), kwargs=kwargs, dynamic_shapes=axes)
    return Example(source, {"image": torch.randn(3, 7, 16), "text": torch.randn(3, 5, 16)})


MODELS: Final[dict[str, Callable[[], Example]]] = {
    "sliding_and_full": sliding_and_full,
    "with_cache": with_cache,
    "two_streams": two_streams,
}


def from_folder(model: nn.Module, *, with_past: bool) -> LoadedSource:
    """The model by the road that the command line takes."""
    with tempfile.TemporaryDirectory() as folder:
        randomised(model).save_pretrained(folder)
        return load_source(folder, with_past=with_past, dtype=torch.float32)


def randomised(model: nn.Module) -> Any:
    """Gains far from one, and weights large enough that attention is not uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand(parameter.shape) - 0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return model


def by_pytorch(example: Example, dtype: torch.dtype) -> list[np.ndarray]:
    """The module's outputs, computed in `dtype`, in the order of the graph's."""
    module = example.source.module.to(dtype)
    inputs: dict[str, Any] = {}
    for name, value in example.inputs.items():
        converted = value.to(dtype) if value.is_floating_point() else value
        argument, *place = name.split(".")
        if place:  # past_key_values.LAYER.PART
            layers = inputs.setdefault(argument, [])
            layers.extend([{}] * (int(place[0]) + 1 - len(layers)))
            layers[-1] = layers[-1] | {place[1]: converted}
        else:
            inputs[argument] = converted
    with torch.no_grad(), mended(module, keep_cache="past_key_values" in inputs):
        made = torch.utils._pytree.tree_leaves(module(**inputs))
    module.float()
    return [tensor.numpy() for tensor in made if isinstance(tensor, torch.Tensor)]


def main() -> None:
    """Write the files of every model and target."""
    folder = FOLDER / f"version-{qk.__version__}"
    folder.mkdir()
    for name, make in MODELS.items():
        torch.manual_seed(20)
        example = make()
        source, arrays = example.source, {f"in/{key}": value.numpy() for key, value in example.inputs.items()}
        for target in TARGETS:
            program = qk.export(
                source.module,
                source.args,
                source.kwargs,
                dynamic_shapes=source.dynamic_shapes,
                target=target,
                require_fusion=True,
            )
            program.save(folder / f"{name}.{target}.onnx")
        names = [value.name for value in program.model.graph.outputs]
        for kind, dtype in (("float64", torch.float64), ("float32", torch.float32)):
            outputs = by_pytorch(example, dtype)
            arrays |= {f"{kind}/{key}": value for key, value in zip(names, outputs, strict=True)}
        np.savez_compressed(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main()
