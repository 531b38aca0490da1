"""One tensor of heads in the three layouts that operators ask for, converted only where it is needed."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import KEEP, BodyBuilder, Dim


@dataclasses.dataclass
class HeadTensor:
    """A value in at least one of the layouts (B, S, H*D), (B, S, H, D), (B, H, S, D); the others are made when asked for."""

    body: BodyBuilder
    num_heads: int
    head_size: Dim
    tag: str
    flat: ir.Value | None = None
    bshd: ir.Value | None = None
    bhsd: ir.Value | None = None

    def as_flat(self) -> ir.Value:
        """(B, S, H*D)."""
        if self.flat is None:
            width = self.body.times(self.head_size, self.num_heads)
            self.flat = self.body.reshape(self.as_bshd(), KEEP, KEEP, width, name=f"{self.tag}_flat")
        return self.flat

    def as_bshd(self) -> ir.Value:
        """(B, S, H, D)."""
        if self.bshd is None and self.flat is not None:
            heads = [KEEP, KEEP, self.num_heads, self.head_size]
            self.bshd = self.body.reshape(self.flat, *heads, name=f"{self.tag}_bshd")
        elif self.bshd is None:
            assert self.bhsd is not None, "a tensor has at least one layout"
            self.bshd = self.body.op("Transpose", self.bhsd, name=f"{self.tag}_bshd", perm=[0, 2, 1, 3])
        return self.bshd

    def as_bhsd(self) -> ir.Value:
        """(B, H, S, D)."""
        if self.bhsd is None:
            self.bhsd = self.body.op("Transpose", self.as_bshd(), name=f"{self.tag}_bhsd", perm=[0, 2, 1, 3])
        return self.bhsd

    def replaced(self, *, flat: ir.Value | None = None, bshd: ir.Value | None = None, bhsd: ir.Value | None = None) -> HeadTensor:
        """Another tensor of the same heads."""
        return HeadTensor(self.body, self.num_heads, self.head_size, self.tag, flat=flat, bshd=bshd, bhsd=bhsd)


def same_size(first: ir.Value, second: ir.Value, *, axis: int) -> bool:
    """Whether both are known to have the same size on `axis`: one number, or one name."""
    if first.shape is None or second.shape is None:
        return False
    dims = [dim if isinstance(dim, int) else dim.value for dim in (first.shape[axis], second.shape[axis])]
    return dims[0] is not None and dims[0] == dims[1]
