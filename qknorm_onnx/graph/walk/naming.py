"""Names of attentions for reports. Nothing is decided by them."""

from __future__ import annotations

import ast

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Core

# torch.onnx writes the path of modules that a node comes from.
SCOPES_KEY = "pkg.torch.onnx.name_scopes"


def attention_name(core: Core) -> str:
    """The module that the attention was traced from, where the file says so, else the name of its output."""
    return module_path(core.node) or core.output.value.name or node_name(core.node)


def node_name(node: ir.Node) -> str:
    """As `attention_name`, for an attention of which no more than the node is known."""
    return module_path(node) or node.outputs[0].name or node.name or node.op_type


def module_path(node: ir.Node) -> str:
    """The module that `node` was traced from; "" where the file does not say it."""
    try:
        path = ast.literal_eval(node.metadata_props.get(SCOPES_KEY, "()"))
    except (ValueError, SyntaxError):
        return ""
    return str(path[-2]) if isinstance(path, (list, tuple)) and len(path) >= 2 else ""
