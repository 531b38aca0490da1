"""Small models and their files as other exporters write them, and whether a fused file computes what the module does."""

from __future__ import annotations

import dataclasses
import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

AXES = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "sequence"}}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A module, and inputs of other sizes than those that it is exported with: batch 3, of which one row is padded."""

    module: torch.nn.Module
    example: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    attentions: int = 2


def qwen3(attention: str, *, layers: int = 2) -> Foreign:
    """A `Qwen3ForCausalLM` with 4:2 heads of 16 values, and norm weights that are not 1."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": layers, "head_dim": 16}
    config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    config._attn_implementation = attention
    module = Only(Qwen3ForCausalLM(config).eval())
    randomise(module)
    return Foreign(module, tokens(2, 6), tokens(3, 9, padded=2), layers)


def cohere(attention: str, *, layers: int = 2) -> Foreign:
    """A `CohereForCausalLM` with 4:2 heads of 16 values, LayerNorm with a gain per head, and an interleaved rotary embedding."""
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": layers}
    config = CohereConfig(
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, use_qk_norm=True, pad_token_id=0, **sizes
    )
    config._attn_implementation = attention
    module = Only(CohereForCausalLM(config).eval())
    randomise(module)
    return Foreign(module, tokens(2, 6), tokens(3, 9, padded=2), layers)


class Only(torch.nn.Module):
    """A language model that takes tensors in order and gives its logits only."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def randomise(module: torch.nn.Module) -> None:
    """Weights of norms between a half and one and a half: with ones, norm and rotary would commute."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter.mul_(3.0)  # far from uniform attention


def tokens(batch: int, length: int, *, padded: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens; the last row has its last `padded` ones masked."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    if padded:
        mask[-1, -padded:] = 0
    return {"input_ids": torch.randint(0, 96, (batch, length), generator=generator), "attention_mask": mask}


def torchscript(source: Foreign, opset: int, axes: dict[str, dict[int, str]] = AXES) -> onnx.ModelProto:
    """What torch.onnx's older exporter writes, without any stored shape in between."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            source.module, tuple(source.example.values()), buffer, dynamo=False, opset_version=opset,
            input_names=list(source.example), output_names=["logits"], dynamic_axes=axes,
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


def dynamo(source: Foreign, opset: int = 18, axes: dict[str, dict[int, str]] = AXES) -> onnx.ModelProto:
    """What torch.onnx writes today."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            source.module, kwargs=source.example, dynamic_shapes=axes, dynamo=True, verbose=False, opset_version=opset
        )
    return program.model_proto


def saved(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """The model as a file."""
    path = folder / name
    onnx.save(model, path)
    return path


def run(model: onnx.ModelProto | Path, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    """The first output, by onnxruntime on one thread, without its optimizer."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    known = {value.name for value in session.get_inputs()}
    return session.run(None, {name: tensor.numpy() for name, tensor in inputs.items() if name in known})[0]


def assert_right(model: onnx.ModelProto, source: Foreign) -> None:
    """At the other sizes, the error against float64 is at most twice that of PyTorch in float32."""
    outputs = run(model, source.inputs)
    with torch.no_grad():
        own = source.module(**source.inputs).numpy()
        double = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in source.inputs.items()}
        exact = source.module.double()(**double).numpy()
        source.module.float()
    assert outputs.shape == exact.shape
    assert np.isfinite(exact).all()
    assert error(outputs, exact) <= 2 * error(own, exact) + 4 * float(np.finfo(np.float32).eps)


def assert_alike(model: onnx.ModelProto, original: onnx.ModelProto | Path, source: Foreign, *, allowed: float = 2e-6) -> None:
    """At the other sizes, a fused file computes what the file computed: for files whose own errors are larger."""
    assert error(run(model, source.inputs), run(original, source.inputs)) <= allowed


def error(given: np.ndarray, exact: np.ndarray) -> float:
    """Largest difference over largest value, none of them NaN or infinite."""
    assert exact.size and np.isfinite(given).all()
    return float(np.abs(given.astype(np.float64) - exact).max() / np.abs(exact).max())
