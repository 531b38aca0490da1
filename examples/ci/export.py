"""Writes `model.onnx`, which this repository publishes: `python export.py`."""

from __future__ import annotations

from copy import deepcopy

import torch
from model import Model, load_model

import qknorm_onnx as qk

EXAMPLE = {"input_ids": torch.tensor([[1, 5, 9, 2, 7], [3, 3, 8, 0, 6]])}
DYNAMIC = {"input_ids": {0: "batch", 1: "sequence"}}


def for_publication(model: Model) -> Model:
    """What is exported: a copy in evaluation mode. Whatever is made simpler or faster for users is made so here."""
    return deepcopy(model).eval()


def export_model(model: Model) -> qk.Program:
    """The file's program."""
    return qk.export(for_publication(model), kwargs=EXAMPLE, dynamic_shapes=DYNAMIC)


if __name__ == "__main__":
    export_model(load_model()).save("model.onnx")
