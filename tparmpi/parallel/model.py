"""A model whose layers live on several places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tparmpi.comm import Group, Place, together
from tparmpi.errors import CommunicationError, UsageError
from tparmpi.nn import Module, Parameter
from tparmpi.parallel.layers import DistributedLayer, LayerParallelism, into_layers
from tparmpi.parallel.placement import LayerPlacement, Stage
from tparmpi.parallel.ties import Ties
from tparmpi.tensors import Tensor, nests, no_grad, random


class DistributedLayeredModel:
    """A model, and where its layers live.

    Making one is collective over the ranks of the placement, which compare what they
    were given; other ranks may make one too.

    Parameters
    ----------
    model
        With `layer_input`, `layers_hidden` and `layer_output`, each built on its place.
    placement
        Which place that is.

    Attributes
    ----------
    model, placement
        As given.
    layers
        All layers in order, the input and the output layer included.
    stages
        Neighbouring layers on one place, in forward order.

    Raises
    ------
    UsageError
        If the placement has not a place for each layer, or a layer was built elsewhere.
    CommunicationError
        If the ranks' placements differ.
    """

    def __init__(self, model: LayerParallelism, placement: LayerPlacement) -> None:
        self.model = model
        self.placement = placement
        self.layers = into_layers(model)
        self.stages = placement.stages()
        placement.check_count(len(self.layers) - 2)
        for number, layer in enumerate(self.layers):
            _check_built(number, len(self.layers), layer, placement.places[number])
        self.everyone: Group = together(placement.devices())
        self._check_agreement()
        self.ties = Ties(self.parameters(with_copies=True))

    def __call__(self, features: Any) -> Any:
        """Return ``forward(features)``."""
        return self.forward(features)

    def forward(self, features: Any) -> Any:
        """Return the predictions, on ``placement.output``; no gradients are recorded.

        Collective over the ranks of the placement. Ranks that are no members of
        ``placement.output`` get shells.

        Parameters
        ----------
        features
            A nest of tensors, on ``placement.input`` or to be moved there.
        """
        self.ties.give_values()
        signal = features
        with no_grad():
            for stage in self.stages:
                signal = _moved(signal, stage.place)
                signal = self.run(stage, signal)
        return signal

    def run(self, stage: Stage, signal: Any) -> Any:
        """Return what the layers of `stage` make of `signal`.

        Collective over the stage's place. Random operators that name no stream draw
        from one of the layer's own, wherever it lives.
        """
        for number in stage.layers:
            layer = self.layers[number]
            with random.unnamed(f"layer {number}"):
                signal = layer(signal) if callable(layer) else layer.forward(signal)
        return signal

    def parameters(self, *, with_copies: bool = False) -> list[Parameter]:
        """Return the parameters of the layers that are modules, each once. Local.

        Parameters
        ----------
        with_copies
            Also those that have the values of another one on another place.
        """
        found: dict[int, Parameter] = {}
        for layer in self.layers:
            if isinstance(layer, Module):
                for _, parameter in layer.named_parameters(with_copies=with_copies):
                    found[id(parameter)] = parameter
        return list(found.values())

    def into_inner(self) -> LayerParallelism:
        """Return the model. Local."""
        return self.model

    def into_stages(self) -> list[tuple[Place, list[Any]]]:
        """Return each stage's place and layers, in forward order. Local."""
        return [
            (stage.place, self.layers[stage.layers.start : stage.layers.stop])
            for stage in self.stages
        ]

    def _check_agreement(self) -> None:
        everyone = self.everyone
        if not everyone.is_member or everyone.size == 1:
            return
        own = [
            ([device.rank for device in stage.place.devices], tuple(stage.layers))
            for stage in self.stages
        ]
        for device, other in zip(
            everyone.devices, everyone.all_gather_object(own), strict=True
        ):
            if other != own:
                raise CommunicationError(
                    "DistributedLayeredModel: rank "
                    f"{everyone.devices[everyone.rank].rank} places the layers "
                    f"otherwise than rank {device.rank}; all ranks must give the same "
                    "placement"
                )


def _check_built(number: int, count: int, layer: Any, place: Place) -> None:
    wanted = place.inner()
    name = f"hidden layer {number - 1}"
    if number == 0:
        name = "the input layer"
    elif number == count - 1:
        name = "the output layer"
    for found in _places_of(layer):
        if found is not wanted:
            raise UsageError(
                f"DistributedLayeredModel: {name} must be built on {wanted!r}, where "
                f"the placement puts it; it is on {found!r}"
            )


def _places_of(layer: Any) -> Sequence[Place]:
    """The plain places that a layer names, or where its parameters live."""
    if isinstance(layer, Module):
        parameters = layer.named_parameters(with_copies=True)
        return [parameter.spec.place for _, parameter in parameters]
    if isinstance(layer, DistributedLayer):
        return [layer.input.inner(), layer.output.inner()]
    return []


def _moved(signal: Any, place: Place) -> Any:
    inner = place.inner()
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if tensor.spec.place is inner:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(place)
        return moved[id(tensor)]

    return nests.replace(signal, move)
