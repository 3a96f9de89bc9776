"""What a model must be for its layers to be placed apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from tparmpi.comm import Place
from tparmpi.errors import UsageError
from tparmpi.nn import Module


@runtime_checkable
class DistributedLayer(Protocol):
    """A layer that says where it takes its input and where it leaves its output.

    Modules need not say it: they live where their parameters live.

    Attributes
    ----------
    input, output
        The places.
    """

    input: Place
    output: Place

    def forward(self, signal: Any) -> Any:
        """Return what the next layer takes."""


@runtime_checkable
class LayerParallelism(Protocol):
    """A model whose layers can be placed apart.

    Each layer takes what the one before returns: any nest of tensors.
    """

    @property
    def layer_input(self) -> Any:
        """The layer that takes the features."""

    @property
    def layers_hidden(self) -> Sequence[Any]:
        """The layers between, in order."""

    @property
    def layer_output(self) -> Any:
        """The layer that gives the predictions."""


class LayerSequence(Module):
    """A model that is a sequence of layers.

    Parameters
    ----------
    *layers
        At least two; the first is the input layer, the last the output layer.

    Raises
    ------
    UsageError
        If there are fewer than two layers.
    """

    def __init__(self, *layers: Any) -> None:
        if len(layers) < 2:
            raise UsageError(
                "LayerSequence: give an input layer and an output layer at least"
            )
        self.layers = list(layers)
        self.assign_paths()

    @property
    def layer_input(self) -> Any:
        """The layer that takes the features."""
        return self.layers[0]

    @property
    def layers_hidden(self) -> list[Any]:
        """The layers between, in order."""
        return self.layers[1:-1]

    @property
    def layer_output(self) -> Any:
        """The layer that gives the predictions."""
        return self.layers[-1]

    def forward(self, signal: Any) -> Any:
        """Return what the last layer makes of `signal`; all layers on one place."""
        for layer in self.layers:
            signal = layer(signal)
        return signal


def into_layers(model: LayerParallelism) -> list[Any]:
    """Return all layers of `model`, input and output included, in order. Local."""
    return [model.layer_input, *model.layers_hidden, model.layer_output]
