"""What an entry of the zoo is, how it is registered, and the random numbers of its weights and inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

B = 2
S = 12
VOCAB = 128

# (module, example inputs, names of the dynamic axes, tags)
Built = tuple[nn.Module, dict[str, torch.Tensor], dict[str, dict[int, str]], dict[str, Any]]
# Called with attention="eager" (the default) or "sdpa": the implementation that transformers builds.
Entries = dict[str, Callable[..., Built]]

EAGER_ONLY = "eager (sdpa unsupported)"
# Parameters of one value for each head or channel: random too.
SCALES = ("sinks", "logit_scale", "tau", "temp", "temperature", "sqk", "s_gate", "A", "scaling")


def entry(entries: Entries, name: str, tags: dict[str, Any]) -> Callable[..., Any]:
    """Registers `make(attention)`, which returns (module, inputs, axes), as `entries[name]`."""

    def register(make):
        def build(attention: str = "eager") -> Built:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module, inputs, axes, used = made(make, attention)
            own = {"attn_impl": used} if tags.get("lib") == "transformers" else {}
            return module.float().eval(), inputs, axes, tags | own

        entries[name] = build
        return make

    return register


def made(make, attention):
    """What `make` returns, from the same random numbers each time; models that have no other implementation are built eager."""
    torch.manual_seed(0)
    try:
        return *make(attention), attention
    except (ValueError, ImportError) as error:
        if attention == "eager" or "attention implementation" not in str(error):
            raise
    torch.manual_seed(0)
    return *make("eager"), EAGER_ONLY


def randomised(module: nn.Module, seed: int = 1234) -> Any:
    """The module with gains, biases, sinks and temperatures far from what they are initialised to, other ones for q and k."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(parameter):
        return torch.rand(parameter.shape, generator=generator) - 0.5

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point():
                continue
            if not torch.isfinite(parameter).all() or parameter.abs().max() > 1e4:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            *_, leaf = path = name.split(".")
            of_norm = any("norm" in part.lower() or part.lower().startswith("ln") for part in path[-3:]) and parameter.ndim <= 2
            if of_norm and leaf == "weight" and (parameter.ndim == 1 or parameter.shape[0] <= 16):
                parameter.add_(uniform(parameter))
            elif of_norm and leaf == "bias":
                parameter.add_(uniform(parameter) * 0.6)
            elif leaf in SCALES or (leaf == "gate" and parameter.ndim == 1):
                parameter.add_(uniform(parameter) * parameter.abs().mean().clamp_min(0.5))
            elif parameter.ndim >= 2 and parameter.std() < 0.03:  # transformers' 0.02 makes attention nearly uniform
                parameter.mul_(3.0)
    return module


def token_ids() -> torch.Tensor:
    """Tokens (B, S) that no configuration uses for padding or the ends of a text."""
    return torch.randint(5, VOCAB - 8, (B, S), generator=torch.Generator().manual_seed(7))


def normal(*shape: int, seed: int = 11) -> torch.Tensor:
    """Random numbers of unit variance."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
