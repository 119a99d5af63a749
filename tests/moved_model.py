"""Weights that visibly differ, for tests of a weight sync."""

import copy

import torch


def moved(model, scale: float = 0.05):
    """The same model after a large step."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model
