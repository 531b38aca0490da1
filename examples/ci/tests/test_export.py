"""The published file is the model: the same numbers, and a norm of queries and keys in every attention."""

from __future__ import annotations

import pytest
from model import load_model

from export import EXAMPLE, export_model


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def program(model):
    return export_model(model)


def test_the_file_computes_what_the_model_computes(program, model, assert_parity):
    assert_parity(program, model, kwargs=EXAMPLE, dtypes=("float32", "float16"))


def test_every_attention_has_both_norms(program, model):
    assert program.report.complete, program.report
    assert len(program.report.fused) == len(model.blocks)
    for attention in program.report.fused:
        assert (attention.spec.norm.q_kind, attention.spec.norm.k_kind) == ("rms", "rms"), str(attention)
