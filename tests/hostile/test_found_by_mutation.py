"""What random changes of files found: one named test for each cause that is no kind of hostile file by itself."""

from __future__ import annotations

import re

import onnx
import pytest

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.body_builder import BodyBuilder
from qknorm_onnx.graph.model_file import load_model
from qknorm_onnx.graph.soundness.guard import make_sound
from qknorm_onnx.spec.qk_norm_spec import SpecError
from tests.hostile import seeds
from tests.hostile.changes import node_of


def of_size(model: onnx.ModelProto, axis: int, size: int) -> onnx.ModelProto:
    """The model with one axis of all its inputs fixed."""
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) > axis:
            dims[axis].dim_value = size
    return model


def test_a_region_too_large_to_run_is_kept_and_called_unverified():
    (attention,) = qk.fuse(of_size(seeds.spelled(), 0, 1 << 31)).report.fused
    assert attention.note == "unverified: it cannot be run in float64: no sizes that can be tried fit its dimensions"


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 1 << 80])
def test_a_size_beyond_int64_is_refused_by_function_bodies(number):
    with pytest.raises(SpecError, match=f"a size of {number} is larger than a tensor can be"):
        BodyBuilder().ints(3, number)


@pytest.mark.parametrize("seed", ["spelled", "canonical"])
@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1])
def test_sizes_of_which_no_product_fits_int64_end_in_one_line(seed, size):
    with pytest.raises(InputError, match="overflow"):
        qk.fuse(of_size(getattr(seeds, seed)(), 1, size))


def test_a_size_beyond_int32_is_left_to_its_cast():
    """GroupQueryAttention takes lengths in int32; folded, this one would be an OverflowError."""
    (attention,) = qk.fuse(of_size(seeds.canonical(), 1, 1 << 31), target="ort").report.fused
    assert attention.target == "ort"


def test_device_configurations_that_no_message_can_say_end_in_one_line():
    """A model in memory was not checked as a message: it is when it is written."""
    source = seeds.plain()
    source.ir_version = 11
    node_of(source, "relu").device_configurations.add(configuration_id="mesh").sharding_spec.add(tensor_name="h", device=[0, 1])
    model = load_model(source)
    node = next(node for node in model.graph if node.op_type == "Relu")
    (configuration,) = node.device_configurations
    (spec,) = configuration.sharding_specs
    object.__setattr__(spec, "value", None)
    with pytest.raises(InputError, match=r"the model cannot be written as it was read: .*ShardingSpec"):
        make_sound(model, "the model")


def test_device_configurations_are_kept():
    source = seeds.plain()
    source.ir_version = 11
    source.configuration.add(name="mesh", num_devices=2, device=["a", "b"])
    configuration = node_of(source, "relu").device_configurations.add(configuration_id="mesh")
    configuration.sharding_spec.add(tensor_name="h", device=[0, 1]).sharded_dim.add(axis=1).simple_sharding.add(num_shards=2)
    written = qk.fuse(source).to_proto()
    assert written.configuration == source.configuration
    assert node_of(written, "relu").device_configurations == node_of(source, "relu").device_configurations


@pytest.mark.parametrize(
    ("domain", "version", "said"),
    [
        ("ai.qknorm", 99, "imports ai.qknorm in version 99; this qknorm-onnx knows version 1 only"),
        ("ai.qknorm", 0, "imports ai.qknorm in version 0"),
        ("", 999, "is of ONNX opset 999"),
        ("", -1, "is of ONNX opset -1"),
    ],
)
@pytest.mark.parametrize("seed", ["functions", "canonical"])
def test_versions_that_do_not_exist_are_refused_in_functions_too(seed, domain, version, said):
    model = seeds.SEEDS[seed]()
    function = model.functions[-1]
    kept = [entry for entry in function.opset_import if entry.domain != domain]
    del function.opset_import[:]
    function.opset_import.extend([*kept, onnx.helper.make_opsetid(domain, version)])
    with pytest.raises(InputError, match=re.escape(f"function {function.domain}::{function.name} {said}")):
        load_model(model)
