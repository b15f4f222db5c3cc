"""Where the parts of a replica run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def nodes_of(group: PlacementGroup) -> tuple[str, ...]:
    """Ray's ids of the nodes that a placement group's bundles are on, each once, the first bundle's first.

    Asks the cluster. Empty while the group has no place.
    """
    from ray.util import placement_group_table

    bundles: dict[int, str] = placement_group_table(group).get("bundles_to_node_id", {})
    return tuple(dict.fromkeys(node for _, node in sorted(bundles.items()) if node))


def own_nodes() -> tuple[str, ...]:
    """Ray's ids of the nodes that the workers of this actor's replica may be on; empty when that is not known."""
    # Imported here: an engine without Ray loads none.
    from ray.util import get_current_placement_group

    group = get_current_placement_group()
    return () if group is None else nodes_of(group)
