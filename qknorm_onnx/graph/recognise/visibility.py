"""Masks of a core: causality and windows as numbers where they are proven, a bias for everything else."""

from __future__ import annotations

from qknorm_onnx.graph.match import Bias, Core, Declined, Visibility
from qknorm_onnx.graph.recognise.mask import MaskContext, MaskFragment, recognise_mask


def read_visibility(core: Core, masks: MaskContext) -> Visibility | Declined:
    """Everything that is added to the logits of `core` or hides keys."""
    visibility = Visibility(is_causal=core.is_causal)
    for bias in core.biases:
        fragment = recognise_mask(
            bias.value,
            context=masks,
            negated=bias.negated,
            query_length=masks.extent(core.query.value, -2),
            key_length=masks.extent(core.key.value, core.key.layout.index("S")) if "S" in core.key.layout else None,
        )
        visibility = _joined(visibility, bias, fragment)
    return visibility


def _joined(visibility: Visibility, bias: Bias, fragment: MaskFragment) -> Visibility:
    return Visibility(
        is_causal=visibility.is_causal,
        left_window_size=visibility.left_window_size,
        right_window_size=visibility.right_window_size,
        biases=(*visibility.biases, bias),
        roots=visibility.roots,
    )
