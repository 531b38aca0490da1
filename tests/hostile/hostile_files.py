"""Files that are wrong in one way each, by kind. `HOSTILE` maps a name to a function that writes the file into a folder.

Each must be refused in one line by everything that reads files. `ODD` are unusual files that are right and must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.hostile.changes import Write
from tests.hostile.damaged_data import external_data, loading, tensors
from tests.hostile.odd_files import foreign, odd
from tests.hostile.wrong_calls import functions, own_nodes
from tests.hostile.wrong_structure import structure

KINDS: dict[str, Callable[[], Iterator[tuple[str, Write]]]] = {
    "loading": loading,
    "tensors": tensors,
    "external data": external_data,
    "structure": structure,
    "functions": functions,
    "our nodes": own_nodes,
}

HOSTILE: dict[str, Write] = {f"{kind}: {name}": write for kind, files in KINDS.items() for name, write in files()}
ODD: dict[str, Write] = dict(odd())  # every door takes them
FOREIGN: dict[str, Write] = dict(foreign())  # read and kept; a session needs the runtime that knows them
