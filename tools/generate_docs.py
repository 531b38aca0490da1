"""Writes the tables in README.md and docs/ from the code and what was measured (tools/*.json); with --check only compares (exit
code 1 where stale).

    python -m tools.generate_docs [--check]

A table stands between the lines `<!-- generated: NAME -->` and `<!-- end of NAME -->`; the rest of a document is written by hand.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, get_args

from qknorm_onnx.lowering.registry import TARGETS, LoweringOutcome
from qknorm_onnx.spec.attributes import AttributeField, attribute_fields, to_attributes
from qknorm_onnx.spec.cpp_header import choices_of
from qknorm_onnx.spec.qk_norm_spec import NormKind, QKNormRotarySpec, QKNormSpec, RotaryOrder
from qknorm_onnx.spec.signature import (
    ATTENTION_INPUTS,
    ATTENTION_OP,
    ATTENTION_OUTPUTS,
    DTYPES,
    KERNEL_DTYPES,
    ROTARY_INPUTS,
    ROTARY_OP,
    ROTARY_OUTPUTS,
    TensorSignature,
)
from qknorm_onnx.spec.targets import TARGET_NAMES
from qknorm_onnx.spec.variants import VARIANTS, Variant
from tools import coverage_table, validation_table
from tools.foreign import results as foreign_results
from tools.lowered_variants import OPSET, ort_on_cuda, outcomes
from tools.runtimes import table as runtime_table
from tools.zoo_facts import KNOWN_FAILURES

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
TEXTS: Final = ("support.md", "coverage.md", "validation.md", "runtimes.md")
DOCUMENTS: Final = (ROOT / "README.md", *(ROOT / "docs" / name for name in TEXTS))

NORM_NAMES: Final = {"none": "none", "rms": "RMSNorm", "layer": "LayerNorm", "l2": "L2"}
ORDER_NAMES: Final = {"none": "no rotary", "after_norm": "before rotary", "before_norm": "after rotary"}
assert set(NORM_NAMES) == set(get_args(NormKind)), "name the new norm kind in NORM_NAMES of tools/generate_docs.py"
assert set(ORDER_NAMES) == set(get_args(RotaryOrder)), "name the new rotary order in ORDER_NAMES of tools/generate_docs.py"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; pipes inside cells are escaped."""
    lines = [list(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(lines[0]), *text[1:]])


def tensors(signature: Iterable[TensorSignature]) -> str:
    """Inputs or outputs of an operator."""
    rows = ([f"`{t.name}`" + (" (optional)" if t.optional else ""), f"`{t.shapes}`", t.constraint, t.doc] for t in signature)
    return table(("name", "shape", "type", "meaning"), rows)


def attributes(spec_type: type[QKNormSpec] | type[QKNormRotarySpec]) -> str:
    """Attributes of an operator with their values and defaults."""
    rows = ([f"`{f.onnx_name}`", _values(spec_type, f), _default(f), f.doc] for f in attribute_fields(spec_type))
    return table(("attribute", "values", "default", "meaning"), rows)


def _values(spec_type: type[QKNormSpec] | type[QKNormRotarySpec], field: AttributeField) -> str:
    choices = choices_of(spec_type, field)
    if choices is not None:
        return ", ".join(f"`{choice}`" for choice in choices)
    return {int: "int", float: "float", bool: "0 or 1"}.get(field.type, "string")


def _default(field: AttributeField) -> str:
    if field.required:
        return "required"
    default = int(field.default) if field.type is bool else field.default
    return f"`{default}`"


def kernels() -> str:
    """Which types a native kernel serves; every other combination runs the node's own function body."""
    rows = [
        [f"`{op}`", provider, *("native" if dtype in served else "function body" for dtype in DTYPES)]
        for (op, provider), served in KERNEL_DTYPES.items()
    ]
    return table(("operator", "provider", *DTYPES), rows)


def forms() -> str:
    """Official variants by the form of their norm: the short table of the README."""
    names_of: dict[tuple[str, str, str], list[str]] = {}
    for variant in VARIANTS.values():
        if variant.claim == "official":
            names_of.setdefault(_form(variant), []).append(variant.name)
    rows = sorted([*form, ", ".join(sorted(names))] for form, names in names_of.items())
    return table(("norm of q and k", "statistics over", "where", "as in"), rows)


def _form(variant: Variant) -> tuple[str, str, str]:
    norm = variant.spec.norm
    kinds = sorted({norm.q_kind, norm.k_kind} - {"none"})
    kind = ", ".join(NORM_NAMES[k] for k in kinds) or "none"
    if kinds and "none" in (norm.q_kind, norm.k_kind):
        kind += " (k only)" if norm.q_kind == "none" else " (q only)"
    over = "the whole projection" if norm.axis == "hidden" else "each head" if norm.groups == 1 else "groups inside each head"
    if not kinds:
        return kind, "", "rotary" if variant.spec.rotary.order != "none" else "no rotary"
    return kind, over, ORDER_NAMES[variant.spec.rotary.order]


def targets() -> str:
    """What becomes of every variant under every target."""
    rows = ([f"`{v.name}`", *(_outcome(target, outcome) for target, outcome in outcomes(v).items())] for v in VARIANTS.values())
    return table(("variant", *(f"`{target}`" for target in TARGETS)), rows)


def targets_on_cuda() -> str:
    """What becomes of every variant under the target `ort` for CUDA."""
    return table(("variant", "`ort` for CUDA"), ([f"`{v.name}`", _outcome("ort", ort_on_cuda(v))] for v in VARIANTS.values()))


def _outcome(asked_for: str, outcome: LoweringOutcome) -> str:
    if outcome.target == asked_for and asked_for == "custom-op":
        return "yes"  # its note says which kernel runs, which the table of kernels says once
    if outcome.target != asked_for:
        return f"as `{outcome.target}`: {outcome.note.partition('; ')[0].removeprefix(f'not {asked_for}: ')}"
    return outcome.note or "yes"


def variants() -> str:
    """Every variant with what differs from the defaults, its inputs and its source."""
    rows = [
        [f"`{v.name}`", v.summary, _settings(v), ", ".join(f"`{i.name} {i.shape}`" for i in v.inputs), v.claim, _source(v)]
        for v in VARIANTS.values()
    ]
    return table(("variant", "in words", "attributes", "optional inputs", "claim", "source"), rows)


def _settings(variant: Variant) -> str:
    defaults = {field.onnx_name: field.default for field in attribute_fields(QKNormSpec)}
    skipped = ("q_num_heads", "kv_num_heads", "scale")
    changed = {k: v for k, v in to_attributes(variant.spec).items() if v != defaults[k] and k not in skipped}
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in changed.items())


def _source(variant: Variant) -> str:
    return f"[{variant.version or 'paper'}]({variant.source})"


def _measured(make: Callable[[Sequence[coverage_table.Row]], str]) -> str:
    return make(coverage_table.explained(coverage_table.read_rows().values(), KNOWN_FAILURES))


FOREIGN_HEADER: Final = ("file from", "files", "attentions fused", "files that compute the same", "what is not fused, and why")
TABLES: Final[dict[str, Callable[[], str]]] = {
    "forms": forms,
    "kernels": kernels,
    "variants": variants,
    f"targets at opset {OPSET}": targets,
    "target ort for CUDA": targets_on_cuda,
    f"inputs of {ATTENTION_OP}": lambda: tensors(ATTENTION_INPUTS),
    f"outputs of {ATTENTION_OP}": lambda: tensors(ATTENTION_OUTPUTS),
    f"attributes of {ATTENTION_OP}": lambda: attributes(QKNormSpec),
    f"inputs of {ROTARY_OP}": lambda: tensors(ROTARY_INPUTS),
    f"outputs of {ROTARY_OP}": lambda: tensors(ROTARY_OUTPUTS),
    f"attributes of {ROTARY_OP}": lambda: attributes(QKNormRotarySpec),
    **{f"files of target {name}": functools.partial(runtime_table.markdown, name) for name in TARGET_NAMES},
    "what files need": runtime_table.needs,
    **{name: functools.partial(_measured, make) for name, make in coverage_table.TABLES.items()},
    **validation_table.TABLES,
    "files from other tools": lambda: table(FOREIGN_HEADER, foreign_results.table()),
}

NO_PLACE: Final = "put the lines `<!-- generated: {name} -->` and `<!-- end of {name} -->` into the text that it belongs to"
BLOCK: Final = re.compile(r"<!-- generated: (?P<name>[^>]+) -->\n.*?<!-- end of (?P=name) -->", flags=re.DOTALL)


def with_tables(text: str) -> str:
    """The document with every generated block written anew. KeyError for a table that does not exist."""
    return BLOCK.sub(lambda m: f"<!-- generated: {m['name']} -->\n{TABLES[m['name']]()}\n<!-- end of {m['name']} -->", text)


def main() -> int:
    """Exit code: 0 all is up to date or written, 1 something is stale or a table is in no document."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    used = {match["name"] for text in texts.values() for match in BLOCK.finditer(text)}
    missing = set(TABLES) - used
    if missing:
        for name in sorted(missing):
            print(f"no document holds the table {name!r}: {NO_PLACE.format(name=name)}")
        return 1
    stale = {path: with_tables(text) for path, text in texts.items() if with_tables(text) != text}
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run: python -m tools.generate_docs")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
