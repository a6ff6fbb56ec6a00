"""A small model of layers in a chain, on which RegMean++'s golden vectors were made."""

import torch
from torch import nn


class Link(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x) + shift)))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.layers = nn.ModuleList(Link() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
