"""Files are read with their weights apart, which is not to be seen: the same model, or refusal, as from one message."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph import split_file as module
from qknorm_onnx.graph.model_file import load_model, save_model

RANDOM = np.random.default_rng(0)
LARGE = module.LARGE_TENSOR_BYTES


def tensor(name: str, array: np.ndarray, **more: object) -> onnx.TensorProto:
    made = ir.to_proto(ir.Tensor(array, name=name))
    for key, value in more.items():
        setattr(made, key, value)
    return made


def model_with(*weights: onnx.TensorProto) -> onnx.ModelProto:
    """Each weight goes through an Identity of its own."""
    nodes = [onnx.helper.make_node("Identity", [weight.name], [f"y{place}"]) for place, weight in enumerate(weights)]
    outputs = [
        onnx.helper.make_tensor_value_info(f"y{place}", weight.data_type, list(weight.dims))
        for place, weight in enumerate(weights)
    ]
    graph = onnx.helper.make_graph(nodes, "g", [], outputs, initializer=list(weights))
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=11)


def large(seed: int = 0, *, size: int = 300_000) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def weights_of(model: ir.Model) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}


def both(path, monkeypatch) -> tuple[object, object]:
    """What reading apart gives, and what reading as one message gives: a serialised model, or a message."""
    found = []
    for threshold in (1, 1 << 60):
        monkeypatch.setattr(module, "_LARGE_FILE_BYTES", threshold)
        try:
            found.append(ir.to_proto(load_model(path)).SerializeToString(deterministic=True))
        except InputError as error:
            found.append(str(error))
    return found[0], found[1]


def test_weights_of_every_type_are_read(tmp_path):
    path = tmp_path / "model.onnx"
    arrays = {
        "float32": large().reshape(3, 100, 1000),
        "float16": large(1).astype(np.float16),
        "bfloat16": large(2).astype(ml_dtypes.bfloat16),
        "int64": RANDOM.integers(-(1 << 60), 1 << 60, 20_000),
        "bool": RANDOM.random(200_000) > 0.5,
        "float8": large(3).astype(ml_dtypes.float8_e4m3fn),
        "complex": (large(4) + 1j * large(5)).astype(np.complex64),
        "small": large(6, size=5),
        "scalar": np.array(2.5, dtype=np.float32),
    }
    made = model_with(*(tensor(name, array, doc_string=f"about {name}") for name, array in arrays.items()))
    made.graph.initializer[0].metadata_props.add(key="k", value="v")
    onnx.save(made, path)
    with path.open("rb") as file:
        split = module.split_file(file)
    assert len(split.content) < 40_000 < path.stat().st_size
    found = load_model(path)
    for name, array in arrays.items():
        value = found.graph.initializers[name].const_value
        assert value.doc_string == f"about {name}"
        np.testing.assert_array_equal(np.frombuffer(value.numpy().tobytes(), np.uint8), np.frombuffer(array.tobytes(), np.uint8))
    assert found.graph.initializers["float32"].const_value.metadata_props == {"k": "v"}
    path.unlink()
    save_model(found, tmp_path / "again.onnx")
    assert weights_of(load_model(tmp_path / "again.onnx"))["int64"].tobytes() == arrays["int64"].tobytes()


def test_what_is_packed_text_or_spread_over_fields_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    texts = onnx.helper.make_tensor("texts", onnx.TensorProto.STRING, [2], [b"x" * LARGE, b"y"])
    spread = onnx.helper.make_tensor("spread", onnx.TensorProto.FLOAT, [LARGE], large(size=LARGE))
    packed = tensor("packed", RANDOM.integers(-8, 8, 4 * LARGE).astype(ml_dtypes.int4))
    onnx.save(model_with(texts, spread, packed, tensor("plain", large())), path)
    apart, whole = both(path, monkeypatch)
    assert apart == whole
    assert isinstance(apart, bytes)


def test_messages_that_a_parser_merges_are_left_to_it(tmp_path, monkeypatch):
    """A field that stands twice: of a graph both parts count, of a scalar the last."""
    first, second = model_with(tensor("a", large())), onnx.ModelProto()
    second.graph.doc_string = "more of the graph"
    path = tmp_path / "model.onnx"
    path.write_bytes(first.SerializeToString() + second.SerializeToString())
    apart, whole = both(path, monkeypatch)
    assert apart == whole
    assert load_model(path).graph.doc_string == "more of the graph"


def test_a_wrong_length_is_refused_in_the_same_words(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    for change in ({"dims": [299_999]}, {"dims": [-1]}, {"data_type": 99}, {"data_type": onnx.TensorProto.STRING}):
        made = model_with(tensor("a", large()))
        for key, value in change.items():
            made.graph.initializer[0].ClearField(key)
            if key == "dims":
                made.graph.initializer[0].dims.extend(value)
            else:
                setattr(made.graph.initializer[0], key, value)
        path.write_bytes(made.SerializeToString())
        apart, whole = both(path, monkeypatch)
        assert apart == whole
        assert isinstance(apart, str) and "tensor a" in apart


def test_damaged_files_end_as_they_do_from_one_message(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    content = model_with(tensor("a", large(size=20_000)), tensor("b", large(1, size=17_000))).SerializeToString()
    edges = [place for place in range(len(content)) if place < 40 or place > len(content) - 300 or 80_000 < place < 80_100]
    refused = 0
    for number in range(300):
        random = np.random.default_rng(number)
        changed = bytearray(content)
        for _ in range(int(random.integers(1, 4))):
            changed[edges[int(random.integers(len(edges)))]] = int(random.integers(256))
        if number % 5 == 0:
            changed = changed[: int(random.integers(1, len(changed)))]
        path.write_bytes(bytes(changed))
        apart, whole = both(path, monkeypatch)
        assert apart == whole, number
        refused += isinstance(apart, str)
    assert 50 < refused < 300, "some are refused, some are read"


def test_external_data_cannot_name_the_place_that_is_left_out(tmp_path):
    """The place is drawn anew for each file; weights beside the file are as before."""
    path = tmp_path / "model.onnx"
    made = model_with(tensor("a", large()), tensor("b", large(1)))
    onnx.save(made, path, save_as_external_data=True, location="weights.bin")
    np.testing.assert_array_equal(weights_of(load_model(path))["b"], large(1))
    with path.open("rb") as file:
        assert module.split_file(file).token != module.split_file(file).token


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model_with(tensor("a", large())), path)
    with path.open("rb") as file:
        split = module.split_file(file)
        model = ir.from_proto(onnx.ModelProto.FromString(split.content))
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(InputError, match="became shorter while it was read"):
            split.put_back(model, file, str(path))


def test_a_file_with_several_hard_links_and_a_link_to_it(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model_with(tensor("a", large())), path)
    os.link(path, tmp_path / "hard.onnx")
    (tmp_path / "soft.onnx").symlink_to(path)
    for name in ("hard.onnx", "soft.onnx"):
        np.testing.assert_array_equal(weights_of(load_model(tmp_path / name))["a"], large())


def test_a_file_is_written_over_itself(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model_with(tensor("a", large()), tensor("b", large(1))), path)
    model = load_model(path)
    del model.graph.initializers["a"]
    model.graph.remove(model.graph[0])
    del model.graph.outputs[0]
    save_model(model, path)
    save_model(model, path)
    np.testing.assert_array_equal(weights_of(load_model(path))["b"], large(1))
