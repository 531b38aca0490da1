"""How far each search of the recognisers goes. All of them in one place, each with its reason.

A search without a bound would read a whole model from every softmax, which is quadratic in the number of layers. A bound
that is reached is never a wrong rewrite: what lies beyond it is not read, and the attention is declined or plain.
Steps are operators in a row, nodes are all operators around a place, whatever the way to them.

"zoo N" is the smallest bound at which the 78 models of `tests/zoo` that export (137 attentions) have the outcomes that they
have today, measured one bound at a time; doubling all of them changes none. Where N is 1 the zoo never comes that way: what
the bound is for stands above it, and test graphs go there.
"""

from __future__ import annotations

from typing import Final

# -- walks along one path -------------------------------------------------------------------------------------------------

# Between an attention and its projections: per head a reshape, a transpose, casts, norm, gain, rotary and repeats, and each
# of them may be written with two or three moves. The longest chains of published models have some 30 steps.
CHAIN_STEPS: Final = 64  # zoo 11

# Between the product of queries and keys and its softmax: scale, soft cap (three operators), clamp, several masks and biases,
# each with a cast or a reshape around it.
SCORE_STEPS: Final = 24  # zoo 4

# Between a softmax and the product with the values: casts, dropout, and the guard against rows of NaN (IsNaN and Where).
PROBABILITY_STEPS: Final = 8  # zoo 2

# Behind the product with the values: the transpose and the merge of heads, with squeezes where there is one head.
OUTPUT_STEPS: Final = 8  # zoo 1

# From heads folded into the batch back to the Reshape that folded them: repeats and transposes lie between.
FOLDED_HEAD_STEPS: Final = 12  # zoo 1

# A row's size is square, mean, epsilon, root and reciprocal, with casts between them and groups joined by reshapes.
ROW_SIZE_STEPS: Final = 12  # zoo 4

# Where an axis of a tensor comes from, or whether a value is computed from weights alone.
AXIS_STEPS: Final = 12  # zoo 1

# Shifted-window attention adds a bias and one mask for each window; more than that no published model has.
WINDOW_MASKS: Final = 4  # zoo 2

# Between two moves of a tensor, before its projection: as many as an exporter puts between a projection and the split of heads.
UNSHAPED_MOVES: Final = 6  # zoo 1

# -- rotary embeddings: what the channels of a tensor and its tables are made of --------------------------------------------

# From the rotated tensor back to what is rotated: two products, halves joined, pairs split, stacked and merged, casts around.
ROTARY_STEPS: Final = 12  # zoo 7

# How many tensors on that way are tried as what is rotated, nearest first; each costs one reading of all channels.
ROTARY_CANDIDATES: Final = 16  # zoo 3

# How deep one channel, or one column of a cos or sin table, is followed: as the way above, and the expansion of the table.
CHANNEL_STEPS: Final = 16  # zoo 8
TABLE_STEPS: Final = 16  # zoo 1

# -- searches over all operators around a place: only for what is said of attention that is not rewritten -------------------

# From a softmax to the products on both sides, whatever lies between: mixed heads, gates and biases have many branches.
SCORE_PATH_NODES: Final = 120  # zoo 1

# Behind queries and keys, for a norm that says that this would be QK-Norm attention; it ends at projections anyway.
NORM_BEHIND_NODES: Final = 60  # zoo 7
UNREAD_NODES: Final = 60  # zoo 1
UNSOFTMAXED_NODES: Final = 60  # zoo 4

# Around a product whose operands are quantised or folded: dequantising adds operators to each of them.
UNREAD_PRODUCT_NODES: Final = 80  # zoo 1

# Behind an attention, for a Reshape that cannot be done: masks and caches have many operators, and lie behind it as well.
CONTRADICTION_NODES: Final = 200

# The same where shapes are unknown, and no axis tells a wrong way from a right one: shorter, for fewer false finds.
UNSHAPED_NODES: Final = 40  # zoo 1
