"""Joint attention of two or three streams, in every order of concatenation, norm, rotary embedding and transposition."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import qknorm_onnx as qk

HEADS, SIZE, WIDTH = 4, 6, 10
LENGTHS = (5, 4, 3)


@dataclasses.dataclass(frozen=True)
class Order:
    """What is done where: `norm` and `rotary` on each stream or on all tokens, axes moved in front of which step."""

    streams: int = 2
    norm: str = "each head of a stream"
    rotary: str = "each stream"
    transpose: str = "behind the concatenation"
    image_first: bool = False

    def __str__(self) -> str:
        first = "image first" if self.image_first else "text first"
        return f"{self.streams} streams, {first}; norm {self.norm}; rotary {self.rotary}; transposed {self.transpose}"


NORMS = ("each head of a stream", "projection of a stream", "each head of all")
ROTARIES = ("none", "each stream", "one stream", "all tokens", "one part of all")
TRANSPOSES = ("in front of the norm", "in front of the concatenation", "behind the concatenation")
ORDERS = [
    Order(*values)
    for values in itertools.product((2, 3), NORMS, ROTARIES, TRANSPOSES, (False, True))
    if not (values[1] == "projection of a stream" and values[3] == "in front of the norm")
    and not (values[1] == "each head of all" and values[2] in ("each stream", "one stream"))
]
QUICK = [order for index, order in enumerate(ORDERS) if index % 16 == 3]


def rotated(x, angles, tokens):
    """Interleaved pairs of (B, S, H, D) or (B, H, S, D), with the axis of the tokens given."""
    shape = [1] * 4
    shape[tokens], shape[3] = x.shape[tokens], SIZE
    cos, sin = (table.repeat_interleave(2, -1).reshape(shape) for table in (angles.cos(), angles.sin()))
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-b, a], dim=-1).flatten(-2) * sin


class Joint(nn.Module):
    """Streams (B, S, C) with projections of their own, in one attention; the result is split again."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.order = order
        names = range(order.streams)
        self.projections = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3)) for _ in names)
        width = HEADS * SIZE if order.norm.startswith("projection") else SIZE
        self.norms = nn.ModuleList(nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(2)) for _ in names)
        for norm in itertools.chain(*self.norms):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
        self.out = nn.ModuleList(nn.Linear(HEADS * SIZE, WIDTH) for _ in names)
        self.register_buffer("angles", torch.randn(sum(LENGTHS), SIZE // 2))

    def stream(self, x, index, part, start):
        """q (part 0), k (1) or v (2) of one stream in front of the concatenation, and the axis of its tokens."""
        order, tokens = self.order, 1
        x = self.projections[index][part](x)
        if part < 2 and order.norm == "projection of a stream":
            x = self.norms[index][part](x)
        x = x.unflatten(-1, (HEADS, SIZE))
        if order.transpose == "in front of the norm":
            x, tokens = x.transpose(1, 2), 2
        if part < 2 and order.norm == "each head of a stream":
            x = self.norms[index][part](x)
        if part < 2 and (order.rotary == "each stream" or (order.rotary == "one stream" and index == 0)):
            x = rotated(x, self.angles[start : start + x.shape[tokens]], tokens)
        if order.transpose == "in front of the concatenation":
            x, tokens = x.transpose(1, 2), 2
        return x, tokens

    def joined(self, streams, part):
        order = self.order
        places = [sum(x.shape[1] for x in streams[:index]) for index in range(len(streams))]
        parts = [self.stream(x, index, part, start) for index, (x, start) in enumerate(zip(streams, places, strict=True))]
        tokens = parts[0][1]
        x = torch.cat([item for item, _ in (parts if order.image_first else parts[::-1])], dim=tokens)
        if part < 2 and order.norm == "each head of all":
            x = self.norms[0][part](x)
        if part < 2 and order.rotary == "all tokens":
            x = rotated(x, self.angles[: x.shape[tokens]], tokens)
        if part < 2 and order.rotary == "one part of all":
            first, rest = x.split([4, x.shape[tokens] - 4], dim=tokens)
            x = torch.cat([first, rotated(rest, self.angles[4 : x.shape[tokens]], tokens)], dim=tokens)
        return x if tokens == 2 else x.transpose(1, 2)

    def forward(self, image, text, third=None, hidden=None):
        streams = [item for item in (image, text, third) if item is not None]
        q, k, v = (self.joined(streams, part) for part in range(3))
        mask = None if hidden is None else hidden[:, None, None]
        x = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        lengths = [item.shape[1] for item in streams]
        parts = x.split(lengths if self.order.image_first else lengths[::-1], dim=1)
        parts = parts if self.order.image_first else parts[::-1]
        return torch.cat([out(item) for out, item in zip(self.out, parts, strict=True)], dim=1)


def inputs_of(order, batch, text):
    lengths = (LENGTHS[0], text, LENGTHS[2])[: order.streams]
    return dict(zip(("image", "text", "third"), (torch.randn(batch, length, WIDTH) for length in lengths), strict=False))


def check(order, run_model, *, text=LENGTHS[1], masked=False):
    module = Joint(order).eval()
    inputs = inputs_of(order, 2, text)
    if masked:
        inputs["hidden"] = torch.rand(2, sum(x.shape[1] for x in inputs.values())) > 0.3
    program = qk.export(module, (), inputs, dynamic_shapes={name: {0: "batch"} for name in inputs}, require_fusion=True)
    assert [attention.note for attention in program.report.fused] == [""]
    inputs = inputs_of(order, 3, text)
    if masked:
        inputs["hidden"] = torch.rand(3, sum(x.shape[1] for x in inputs.values())) > 0.3
    torch.testing.assert_close(run_model(program.model, inputs)[0], module(**inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", QUICK, ids=str)
def test_orders_are_one_node(order, run_model):
    check(order, run_model)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order_is_one_node(order, run_model):
    check(order, run_model)
    check(order, run_model, text=2, masked=True)


class ValidTokens(Joint):
    """Mochi: each sample on its own, with those tokens of its text that a mask names."""

    picked = staticmethod(lambda x, index: x[index : index + 1])

    def forward(self, image, text, valid):
        parts = [[self.stream(x, index, part, 0)[0] for index, x in enumerate((image, text))] for part in range(3)]
        outputs = []
        for sample in range(image.shape[0]):
            places = torch.nonzero(valid[sample]).flatten()
            q, k, v = (
                torch.cat([self.picked(first, sample), self.picked(second, sample)[:, :, places]], dim=2)
                for first, second in parts
            )
            x = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            outputs.append(x[:, : image.shape[1]])
        return torch.cat(outputs)


@pytest.mark.parametrize("picked", ["slice", "chunk"])
def test_samples_with_gathered_tokens_are_a_node_each(picked, run_model):
    module = ValidTokens(Order(rotary="one stream", transpose="in front of the concatenation")).eval()
    if picked == "chunk":
        module.picked = lambda x, index: x.chunk(x.shape[0])[index]
    inputs = {"image": torch.randn(2, 5, WIDTH), "text": torch.randn(2, 4, WIDTH)}
    valid = torch.tensor([[True, False, True, True], [False, True, True, False]])
    program = qk.export(module, (), inputs | {"valid": valid}, require_fusion=True)
    assert [attention.note for attention in program.report.fused] == ["", ""]
    inputs = {name: torch.randn_like(x) for name, x in inputs.items()}
    for flags in (valid.flip(0), torch.ones_like(valid)):
        found = run_model(program.model, inputs | {"valid": flags})[0]
        torch.testing.assert_close(found, module(**inputs, valid=flags), rtol=1e-5, atol=1e-5)


class Added(nn.Module):
    """Wan's image to video: two attentions of the same queries, over keys of the text and of the image, are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.to_q, *self.others = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(5))
        self.others = nn.ModuleList(self.others)
        self.norms = nn.ModuleList(nn.RMSNorm(HEADS * SIZE, eps=1e-5) for _ in range(3))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 2.0)

    def forward(self, x, text, image, hidden):
        heads = [
            self.norms[0](self.to_q(x)),
            *(norm(to_k(y)) for norm, to_k, y in zip(self.norms[1:], self.others[:2], (text, image), strict=True)),
            *(to_v(y) for to_v, y in zip(self.others[2:], (text, image), strict=True)),
        ]
        q, k_text, k_image, v_text, v_image = (item.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for item in heads)
        of_text = scaled_dot_product_attention(q, k_text, v_text, attn_mask=hidden[:, None, None])
        return (of_text + scaled_dot_product_attention(q, k_image, v_image)).transpose(1, 2).flatten(2)


def test_two_attentions_that_are_added_are_two_nodes(run_model):
    module = Added().eval()

    def inputs(batch):
        lengths = {"x": 6, "text": 5, "image": 3}
        tensors = {name: torch.randn(batch, length, WIDTH) for name, length in lengths.items()}
        return tensors | {"hidden": torch.rand(batch, 5) > 0.3}

    example = inputs(2)
    program = qk.export(module, (), example, dynamic_shapes={name: {0: "batch"} for name in example}, require_fusion=True)
    assert [attention.note for attention in program.report.fused] == ["", ""]
    other = inputs(3)
    torch.testing.assert_close(run_model(program.model, other)[0], module(**other), rtol=1e-5, atol=1e-5)
