"""AttentionGroups: which layers of a model keep the same history, and where in the pool each has its KV."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class AttentionGroups:
    """The layers of a group see the same tokens, all or a sliding window of them, and so share a block table.

    All groups take their blocks from one pool: a block has num_places places, and holds the KV of block_size tokens for as
    many layers, those of whatever group it is given to. So blocks that a window frees serve layers that see everything.
    windows: of each group; layers: of each group, the layer in each of its places. A place may be empty in some group.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layer_windows: tuple[int | None, ...]) -> Self:
        """Groups of as many layers as the rarest kind has: one where all layers are alike, two where every other has a
        window."""
        kinds = {window: [] for window in sorted(set(layer_windows), key=lambda window: (window is not None, window))}
        for layer, window in enumerate(layer_windows):
            kinds[window].append(layer)
        size = min(map(len, kinds.values()))
        parts = [
            (window, tuple(layers[begin : begin + size]))
            for window, layers in kinds.items()
            for begin in range(0, len(layers), size)
        ]
        return cls(*zip(*parts))

    @property
    def num_places(self) -> int:
        return max(map(len, self.layers))

    @property
    def of_layers(self) -> list[tuple[int, int]]:
        """(group, place) of each layer."""
        found = {layer: (g, p) for g, layers in enumerate(self.layers) for p, layer in enumerate(layers)}
        return [found[layer] for layer in range(len(found))]
