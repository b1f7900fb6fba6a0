"""Graphs: what is computed."""

from stage.graph.builder import Builder, Options
from stage.graph.graph import Graph, Node
from stage.graph.text import format_graph

__all__ = ["Builder", "Graph", "Node", "Options", "format_graph"]
