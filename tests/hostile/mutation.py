"""Random changes of sound model files: of their bytes, and of the fields of their message."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.hostile import seeds

NUMBERS = (0, 1, -1, 2, 3, 7, 16, 99, 255, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "y",
    "MatMul",
    "If",
    "Loop",
    "Softmax",
    "ai.qknorm",
    "QKNormAttention",
    "com.microsoft",
    "\x1b[2J",
    "ü",
    "a" * 300,
)

Mutation = Callable[[random.Random, Any], None]


@functools.cache
def _sound(name: str) -> bytes:
    return seeds.SEEDS[name]().SerializeToString()


def write_mutated(number: int, folder: Path) -> Path:
    """The file of this number: the same whenever it is asked for."""
    generator = random.Random(number)
    path = folder / "model.onnx"
    name = generator.choice([*seeds.SEEDS, "external"])
    if name == "external":
        seeds.with_external_weights(path)
        content = path.read_bytes()
    else:
        content = _sound(name)
    if generator.random() < 0.35:
        path.write_bytes(_changed_bytes(generator, content))
        return path
    model = onnx.ModelProto.FromString(content)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        _change_field(generator, model)
    path.write_bytes(model.SerializePartialToString())
    return path


def _changed_bytes(generator: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(generator.choice((1, 1, 2, 4, 16))):
        at = generator.randrange(len(data))
        size = generator.choice((1, 2, 8, 64))
        kind = generator.randrange(5)
        if kind == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            data[at] = generator.randrange(256)
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = generator.randbytes(size)
        else:
            data[at:at] = data[max(0, at - size) : at]
        if not data:
            break
    if generator.random() < 0.1:
        del data[generator.randrange(len(data) + 1) :]
    return bytes(data)


def _change_field(generator: random.Random, model: onnx.ModelProto) -> None:
    messages = list(_messages(model))
    message = generator.choice(messages)
    fields = message.DESCRIPTOR.fields
    present = [field for field, _ in message.ListFields()]
    field = generator.choice(present) if present and generator.random() < 0.85 else generator.choice(list(fields))
    try:
        if field.is_repeated:
            _change_repeated(generator, message, field, messages)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            _change_message(generator, message, field, messages)
        elif generator.random() < 0.15:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _scalar(generator, field, messages))
    except (ValueError, TypeError):
        message.ClearField(field.name)  # a number that the field does not take


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for child in value if field.is_repeated else [value]:
                yield from _messages(child)


def _change_repeated(generator: random.Random, message: Any, field: FieldDescriptor, messages: list[Message]) -> None:
    items = getattr(message, field.name)
    kind = generator.randrange(4)
    if items and kind == 0:
        del items[generator.randrange(len(items))]
    elif items and kind == 1:
        items.append(items[generator.randrange(len(items))])
    elif len(items) > 1 and kind == 2:
        copies = list(items)
        generator.shuffle(copies)
        copies = [_copy(item) for item in copies]
        del items[:]
        items.extend(copies)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        same = [item for item in messages if field.message_type == item.DESCRIPTOR]
        items.append(generator.choice(same) if same else field.message_type._concrete_class())
    elif items:
        items[generator.randrange(len(items))] = _scalar(generator, field, messages)
    else:
        items.append(_scalar(generator, field, messages))


def _copy(item: Any) -> Any:
    if not isinstance(item, Message):
        return item
    copy = type(item)()
    copy.CopyFrom(item)
    return copy


def _change_message(generator: random.Random, message: Any, field: FieldDescriptor, messages: list[Message]) -> None:
    same = [item for item in messages if field.message_type == item.DESCRIPTOR]
    if same and generator.random() < 0.6:
        chosen = _copy(generator.choice(same))
        getattr(message, field.name).CopyFrom(chosen)
    else:
        message.ClearField(field.name)


def _scalar(generator: random.Random, field: FieldDescriptor, messages: list[Message]) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        names = [name for name in (getattr(item, "name", "") for item in messages) if name]
        return generator.choice(names if names and generator.random() < 0.6 else TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return generator.randbytes(generator.choice((0, 1, 4, 33)))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return generator.choice(FLOATS)
    return generator.choice(NUMBERS)
