"""Graphs as pictures, in Graphviz's language."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jax_kvblock.graphs.description import INPUT, PARAMETER, Description, Source
from jax_kvblock.graphs.operations import KernelOperation

PICTURES = {".svg", ".png", ".pdf"}


def dot_of(graph: Description, depth: int) -> str:
    """The text. depth: how many levels of graphs in graphs are opened."""
    drawing = Drawing()
    own = [drawing.port(f"in_{i}", str(p)) for i, p in enumerate(graph.inputs)]
    numbers = [
        drawing.port(f"parameter_{i}", str(p), "diamond")
        for i, p in enumerate(graph.parameters)
    ]
    made, _ = drawing.inside(graph, own, numbers, "", depth)
    for i, (port, end) in enumerate(zip(graph.outputs, made, strict=True)):
        drawing.edge(end, drawing.port(f"out_{i}", str(port)))
    body = "\n".join(f"  {line}" for line in drawing.lines)
    head = '  rankdir=TB; node [shape=box, fontname="Helvetica", fontsize=11];'
    return f"digraph {_quoted(graph.name)} {{\n{head}\n{body}\n}}\n"


def save(text: str, path: Path) -> None:
    """Writes text, or the picture that `dot` makes of it."""
    if path.suffix not in PICTURES:
        path.write_text(text)
        return
    if shutil.which("dot") is None:
        raise RuntimeError(
            f"draw: {path.suffix} needs Graphviz's program dot, which is not here "
            "(apt install graphviz); a path that ends in .dot gets the text"
        )
    command = ["dot", f"-T{path.suffix[1:]}", "-o", str(path)]
    subprocess.run(command, input=text, text=True, check=True)


class Drawing:
    """Lines of the picture so far. An end is the name of what a wire begins at."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def port(self, end: str, label: str, shape: str = "ellipse") -> str:
        self.lines.append(f"{end} [label={_quoted(label)}, shape={shape}];")
        return end

    def edge(self, start: str, end: str, style: str = "solid", label: str = "") -> None:
        shown = f", label={_quoted(label)}, fontsize=9" if label else ""
        self.lines.append(f"{start} -> {end} [style={style}{shown}];")

    def inside(
        self,
        graph: Description,
        inputs: Sequence[str],
        parameters: Sequence[str],
        prefix: str,
        depth: int,
    ) -> tuple[list[str], list[str]]:
        """Draws the nodes of a graph.

        Returns the ends of its outputs, and the nodes that take its inputs.
        """
        made: list[list[str]] = []
        takers: list[str] = []

        def end_of(source: Source) -> str:
            if source.node == INPUT:
                return inputs[source.port]
            if source.node == PARAMETER:
                return parameters[source.port]
            return made[source.node][source.port]

        for number, node in enumerate(graph.nodes):
            here = f"{prefix}node_{number}"
            ins = [end_of(s) for s in node.inputs]
            numbers = [s and end_of(s) for s in node.scalars]
            inner = node.operation
            if isinstance(inner, Description) and depth > 0:
                ends, starts = self._opened(inner, node.name, ins, numbers, here, depth)
            else:
                self.port(here, node.name, _shape(inner))
                for port, end in zip(inner.inputs, ins, strict=True):
                    self.edge(end, here, label=port.name)
                for parameter, start in zip(inner.parameters, numbers, strict=True):
                    if start is not None:
                        self.edge(start, here, label=parameter.name)
                ends, starts = [here] * len(inner.outputs), [here]
            for end in dict.fromkeys(e for before in node.after for e in made[before]):
                for start in starts:
                    self.edge(end, start, style="dashed")
            made.append(ends)
            taken = [s for s in (*node.inputs, *node.scalars) if s is not None]
            if any(source.node in (INPUT, PARAMETER) for source in taken):
                takers += starts
        return [end_of(source) for source in graph.results], takers

    def _opened(
        self,
        graph: Description,
        label: str,
        inputs: Sequence[str],
        parameters: Sequence[str | None],
        here: str,
        depth: int,
    ) -> tuple[list[str], list[str]]:
        self.lines.append(f"subgraph cluster_{here} {{ label={_quoted(label)};")
        numbers = [
            self.port(f"{here}_parameter_{i}", str(p), "diamond")
            if end is None
            else end
            for i, (p, end) in enumerate(zip(graph.parameters, parameters, strict=True))
        ]
        made = self.inside(graph, inputs, numbers, f"{here}_", depth - 1)
        self.lines.append("}")
        return made


def _shape(operation: object) -> str:
    if isinstance(operation, KernelOperation):
        return "box"
    return "box3d" if isinstance(operation, Description) else "component"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
