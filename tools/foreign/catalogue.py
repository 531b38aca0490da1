"""Which files are made, and with which tools: names only, so that everything else agrees on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final, Literal

Exporter = Literal["torchscript", "as written", "with past", "merged"]
OPSETS: Final = (14, 17, 18)
# Entries of the zoo, with what transformers is asked for, and how many attentions they have.
IMPLEMENTATIONS: Final = {
    **dict.fromkeys(("qwen3", "gemma3_text", "olmo2", "phi_qk", "cohere_qk"), ("eager", "sdpa")),
    **dict.fromkeys(("h_cosine_tau_per_head", "swinv2"), ("eager",)),
}
ATTENTIONS: Final = {**dict.fromkeys(IMPLEMENTATIONS, 2), "swinv2": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of the zoo, exported by torch.onnx's older exporter.

    "as written": with what that does to repeat_interleave over a negative axis. "with past": a decoder with its cache under
    optimum's names; "merged": that and one without a past in one file, as optimum makes it for transformers.js; both of the
    Qwen3 of tests/foreign.
    """

    model: str
    attention: str
    opset: int
    exporter: Exporter = "torchscript"

    @property
    def name(self) -> str:
        """Name of its file, without .onnx."""
        kind = "" if self.exporter == "torchscript" else "." + self.exporter.replace(" ", "_")
        return f"{self.model}.{self.attention}.{self.opset}{kind}"

    @property
    def attentions(self) -> int:
        """How many its file has."""
        return ATTENTIONS[self.model] * (2 if self.exporter == "merged" else 1)

    @property
    def inputs(self) -> str:
        """Name of the files of its inputs, without their numbers and .npz."""
        cached = ".cached" if self.exporter in ("with past", "merged") else ""
        return f"{self.model}.{self.attention}{cached}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """What is done to a file: `name` is what `apply_tool.py` knows it by, `label` what the table says.

    after_fusion: the file is fused first, and the tool is given the result. quantises: its result is nothing that could be
    compared with PyTorch. given: the files that it gets, where these are not all of `GIVEN`.
    """

    name: str
    label: str
    after_fusion: bool = False
    quantises: bool = False
    given: tuple[Source, ...] = ()

    @property
    def key(self) -> str:
        """The name, with the order."""
        return f"fused.{self.name}" if self.after_fusion else self.name


NONE: Final = Tool(name="none", label="TorchScript exporter (`dynamo=False`)")
OLDER: Final = Tool(
    name="none.older",
    label="TorchScript exporter, other opsets",
    given=tuple(Source(model=model, attention="eager", opset=opset) for model in ("qwen3", "olmo2") for opset in (13, 15, 16)),
)
AS_WRITTEN: Final = Tool(
    name="none.as_written",
    label="TorchScript exporter as torch 2.13 is",
    given=tuple(
        Source(model="cohere_qk", attention=attention, opset=opset, exporter="as written")
        for attention in ("eager", "sdpa")
        for opset in OPSETS
    ),
)
CACHED: Final = tuple(Source(model="qwen3", attention=a, opset=o, exporter="with past") for a, o in (("sdpa", 17), ("eager", 14)))
MERGED: Final = tuple(Source(model="qwen3", attention=a, opset=17, exporter="merged") for a in ("sdpa", "eager"))
WITH_PAST: Final = Tool(name="none.with_past", label="decoders with a cache, under optimum's names", given=CACHED)
MERGED_DECODERS: Final = Tool(name="none.merged", label="merged decoders, as transformers.js loads them", given=MERGED)
# Files that no tool changed.
UNCHANGED: Final = (NONE, OLDER, AS_WRITTEN, WITH_PAST, MERGED_DECODERS)
TOOLS: Final = (
    *UNCHANGED,
    Tool(name="convert20", label="... then onnx's version converter, to opset 20"),
    Tool(name="convert23", label="... to opset 23"),
    Tool(name="convert24", label="... to opset 24"),
    Tool(name="onnxsim", label="... then onnxsim 0.8.1"),
    Tool(name="onnxslim", label="... then onnxslim 0.1.98"),
    Tool(name="onnxslim+onnxsim", label="... then onnxslim and onnxsim"),
    Tool(name="basic", label="... then saved by onnxruntime, level basic"),
    Tool(name="extended", label="... then saved by onnxruntime, level extended"),
    Tool(name="layout", label="... then saved by onnxruntime, level layout"),
    Tool(name="all", label="... then saved by onnxruntime, level all"),
    Tool(name="fixed+all", label="... with fixed sizes, then saved by onnxruntime, level all"),
    Tool(name="transformers", label="... then `onnxruntime.transformers.optimizer`"),
    Tool(name="preprocessed", label="... then `quant_pre_process`"),
    Tool(name="external", label="... with external data"),
    Tool(name="quantize_dynamic", label="... then `quantize_dynamic`", quantises=True),
    Tool(name="quantize_dynamic+all", label="... then `quantize_dynamic`, saved by onnxruntime, level all", quantises=True),
    Tool(
        name="qdq_weights",
        label="... then static QDQ of products with weights (`nodes_to_exclude` names the others)",
        quantises=True,
    ),
    Tool(name="qdq_channels", label="... the same for each channel, activations in uint8", quantises=True),
    Tool(name="qdq_weights+all", label="... the same, saved by onnxruntime, level all", quantises=True),
    Tool(name="qoperator", label="... the same in QOperator format", quantises=True),
    Tool(name="qdq", label="... then static QDQ of all products, those inside the attention too", quantises=True),
    Tool(name="nbits", label="... then `MatMulNBitsQuantizer`", quantises=True),
    Tool(name="float16_onnxruntime", label="... then onnxruntime's float16 converter"),
    Tool(name="float16_blocked", label="... the same with norms and softmax kept in float32"),
    Tool(name="float16_onnxruntime+all", label="... then onnxruntime's float16 converter, saved by onnxruntime, level all"),
    Tool(name="extended+float16_onnxruntime", label="... saved by onnxruntime, level extended, then its float16 converter"),
    Tool(name="float16_common", label="... then onnxconverter-common's float16 converter"),
    Tool(name="nbits", label="... fused, then `MatMulNBitsQuantizer`", after_fusion=True, quantises=True),
    Tool(name="quantize_dynamic", label="... fused, then `quantize_dynamic`", after_fusion=True, quantises=True),
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
    return tuple(sources()) if tool is NONE else tool.given or GIVEN
