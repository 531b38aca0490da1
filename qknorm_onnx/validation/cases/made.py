"""The cases of a validation: the example, other sizes, and for each meaning of an input the values at which models go wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput, example_sizes
from qknorm_onnx.validation.cases.norm_input import near_epsilon
from qknorm_onnx.validation.cases.padding import padded
from qknorm_onnx.validation.cases.positions import moved_positions
from qknorm_onnx.validation.cases.resized import random_case, resized
from qknorm_onnx.validation.cases.tokens import other_tokens
from qknorm_onnx.validation.cases.values import adversarial


def make_cases(inputs: Sequence[GraphInput], *, domain: Domain | None = None, seeds: int = 1) -> Iterator[Case]:
    """The example; other batches, lengths and pasts; padding; other tokens and positions; adversarial floats; norms near their
    epsilon; `seeds` cases of random values.

    Dimensions that the graph fixes are left as they are. A case that the module itself refuses is left out by the caller.

    Args:
        inputs: the graph's inputs with their examples.
        domain: what is known of module and file beside the example; without it fewer cases can be made.
        seeds: number of further cases with random values at the example's size.
    """
    domain = domain or Domain()
    inputs = domain.refined(inputs)
    yield Case(
        name="example",
        purpose="what the module was called with",
        inputs={i.name: i.example for i in inputs},
        required=True,
    )
    yield from resized(inputs, domain)
    yield from padded(inputs, domain)
    yield from other_tokens(inputs, domain)
    yield from moved_positions(inputs, domain)
    yield from adversarial(inputs)
    yield from near_epsilon(inputs, domain)
    sizes = example_sizes(inputs)
    for seed in range(seeds):
        yield random_case(f"random values {seed}", inputs, sizes, seed=1000 + seed, purpose="values built in")
