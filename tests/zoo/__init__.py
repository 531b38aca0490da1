"""The model zoo: published forms of QK-Norm attention as tiny modules with random weights, on the CPU, in float32.

`ZOO[name](attention="eager")` returns `(module, kwargs, dynamic axes, tags)`: a module in evaluation mode whose
`module(**kwargs)` is one tensor, example inputs, names of the axes that may be dynamic by input, and what is known of it
(library, family, norm, axis, order, rope, scale, mask, extras, attn_impl, cache). `attention` is the implementation that
transformers is asked for, "eager" or "sdpa"; models that have only the first one say so in their tag `attn_impl`.

Names without a prefix are classes of transformers with a tiny configuration, `d_` is one of diffusers, `h_` attention written by
hand. Those with `NOT` in them, and some others (tools/zoo_facts.py), look alike and are no QK-Norm attention.
"""

from __future__ import annotations

from tests.zoo import (
    attention_modules,
    diffusion,
    encoders,
    handwritten,
    more_diffusion,
    other_decoders,
    rms_decoders,
    streams,
    videos,
)
from tests.zoo.attention_block import Attn
from tests.zoo.cached_decode import build_with_cache
from tests.zoo.entries import Entries
from tests.zoo.norm_modules import L2, NGPT, LNb, Tau

__all__ = ["L2", "NGPT", "ZOO", "Attn", "LNb", "Tau", "build_with_cache"]

ZOO: Entries = (
    rms_decoders.ZOO
    | other_decoders.ZOO
    | encoders.ZOO
    | attention_modules.ZOO
    | handwritten.ZOO
    | streams.ZOO
    | diffusion.ZOO
    | videos.ZOO
    | more_diffusion.ZOO
)
