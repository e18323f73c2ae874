"""Which layers share KV blocks: those of one group give them back at the same time.

A KV block holds its tokens' keys and values in all layers of one group, and every group has the same number of layers:
layer i of each group is stored in the same array, so that a block is memory for layer i of whichever group owns it.

    a window on 5 layers of 6, 24 layers     group 0  [ 4 layers without a window ]
                                             group 1  [ 4 layers with one ] ... group 5

Groups that the layers of a window do not fill are padded: places that nobody uses.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from miro_cy.model.spec import ModelSpec

#: Larger groups mean fewer tables and lookups; places left unused are at most this share of a window's layers.
MOST_PADDING = 0.125


@dataclass(frozen=True, slots=True)
class KVGroups:
    """size: places a group. windows: keys that a query of each group sees, itself included; 0: all, and these come
    first. layers: those of each group in their places, `size` at most."""

    size: int
    windows: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    def places(self) -> list[tuple[int, int]]:
        """(group, place in it) of each layer."""
        found = {layer: (g, i) for g, layers in enumerate(self.layers) for i, layer in enumerate(layers)}
        return [found[layer] for layer in range(len(found))]


def kv_groups(spec: ModelSpec) -> KVGroups:
    """The groups of a model. A window that its context never fills is none."""
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for i, layer in enumerate(spec.layers):
        alike[layer.window if layer.window < spec.context else 0].append(i)
    size = _size([len(layers) for layers in alike.values()])
    groups = [
        (window, tuple(layers[at : at + size]))
        for window, layers in sorted(alike.items(), key=lambda item: (item[0] > 0, -item[0]))
        for at in range(0, len(layers), size)
    ]
    return KVGroups(size, tuple(window for window, _ in groups), tuple(layers for _, layers in groups))


def _size(counts: list[int]) -> int:
    """The largest group that pads the layers of no window by more than MOST_PADDING."""
    return next(
        size
        for size in range(min(counts), 0, -1)
        if all(-(-count // size) * size <= count * (1 + MOST_PADDING) for count in counts)
    )
