"""Which files are made, and with which tools: names only, so that everything else agrees on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

OPSETS: Final = (14, 17, 18)
# Entries of the zoo, with what transformers is asked for, and how many attentions they have.
IMPLEMENTATIONS: Final = {
    **dict.fromkeys(("qwen3", "gemma3_text", "olmo2", "phi_qk", "cohere_qk"), ("eager", "sdpa")),
    **dict.fromkeys(("h_cosine_tau_per_head", "swinv2"), ("eager",)),
}
ATTENTIONS: Final = {**dict.fromkeys(IMPLEMENTATIONS, 2), "swinv2": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of the zoo, exported by torch.onnx's older exporter."""

    model: str
    attention: str
    opset: int

    @property
    def name(self) -> str:
        """Name of its file, without .onnx."""
        return f"{self.model}.{self.attention}.{self.opset}"

    @property
    def inputs(self) -> str:
        """Name of the file of its inputs, without .npz."""
        return f"{self.model}.{self.attention}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """What is done to a file: `name` is what `apply_tool.py` knows it by, `label` what the table says.

    after_fusion: the file is fused first, and the tool is given the result.
    """

    name: str
    label: str
    after_fusion: bool = False

    @property
    def key(self) -> str:
        """The name, with the order."""
        return f"fused.{self.name}" if self.after_fusion else self.name


NONE: Final = Tool(name="none", label="TorchScript exporter (`dynamo=False`)")
TOOLS: Final = (
    NONE,
    Tool(name="convert20", label="... then onnx's version converter, to opset 20"),
    Tool(name="convert23", label="... then onnx's version converter, to opset 23"),
    Tool(name="onnxsim", label="... then onnxsim 0.8.1"),
    Tool(name="onnxslim", label="... then onnxslim 0.1.98"),
    Tool(name="basic", label="... then saved by onnxruntime, level basic"),
    Tool(name="extended", label="... then saved by onnxruntime, level extended"),
    Tool(name="layout", label="... then saved by onnxruntime, level layout"),
    Tool(name="all", label="... then saved by onnxruntime, level all"),
    Tool(name="transformers", label="... then `onnxruntime.transformers.optimizer`"),
    Tool(name="quantize_dynamic", label="... then `quantize_dynamic`"),
    Tool(name="qdq_weights", label="... then static QDQ of products with weights (`nodes_to_exclude` names the others)"),
    Tool(name="qdq", label="... then static QDQ of all products, those inside the attention too"),
    Tool(name="nbits", label="... then `MatMulNBitsQuantizer`"),
    Tool(name="float16_onnxruntime", label="... then onnxruntime's float16 converter"),
    Tool(name="float16_common", label="... then onnxconverter-common's float16 converter"),
    Tool(name="nbits", label="... fused, then `MatMulNBitsQuantizer`", after_fusion=True),
    Tool(name="quantize_dynamic", label="... fused, then `quantize_dynamic`", after_fusion=True),
)
# The files that every tool is given: each model once, the opsets and both implementations of attention in turn.
GIVEN: Final = (
    Source(model="qwen3", attention="sdpa", opset=17),
    Source(model="qwen3", attention="eager", opset=14),
    Source(model="gemma3_text", attention="sdpa", opset=18),
    Source(model="olmo2", attention="eager", opset=14),
    Source(model="phi_qk", attention="sdpa", opset=17),
    Source(model="cohere_qk", attention="eager", opset=18),
    Source(model="h_cosine_tau_per_head", attention="eager", opset=18),
    Source(model="swinv2", attention="eager", opset=17),
)


def sources() -> Iterator[Source]:
    """Every file that the exporter is asked for."""
    for model, implementations in IMPLEMENTATIONS.items():
        for attention in implementations:
            for opset in OPSETS:
                yield Source(model=model, attention=attention, opset=opset)


def files_of(tool: Tool) -> tuple[Source, ...]:
    """The files that `tool` is given."""
    return tuple(sources()) if tool is NONE else GIVEN
