"""Errors of graphs. They are ValueErrors, because a graph is always input from a user or a peer."""

from __future__ import annotations


class GraphError(ValueError):
    """A graph, or the bytes of one, that breaks a rule; the message names the rule and the place."""


class NewerGraph(GraphError):
    """A graph for a newer op-set than this software's."""


class UnsupportedModel(GraphError):
    """A sound graph that a rewrite cannot handle without changing what it computes."""


class PlacementError(ValueError):
    """No placement satisfies the constraints; the message says which one binds."""
