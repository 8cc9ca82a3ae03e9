"""Decode steps for the comparison with the floor: matrix products and a touch of what the cache returns, or a model."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from .measure import Sample, timed
from .models import MatrixWork, forward, random_model, state_shape

Step: TypeAlias = Callable[[DynamicCache, int], object]
"""Decodes one token with a cache that holds as many as the second argument says."""

MODEL = "llama"
_COMPUTE_OVER_READ = {"compute-bound": 2.0, "balanced": 1.0, "io-bound": 0.5}


class Settings:
    """The kinds of steps that are compared.

    Args:
        config: Of the model; the synthetic steps have its layers, heads and widths.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config
        self._work = MatrixWork()
        self._model = random_model(config)

    def steps(self, layer_read_s: float) -> dict[str, Step]:
        """Steps by name: compute of twice, once and half of `layer_read_s` seconds a layer, and a real model."""
        synthetic: dict[str, Step] = {
            name: partial(_synthetic_step, self._config, self._work, self._work.count_for(ratio * layer_read_s))
            for name, ratio in _COMPUTE_OVER_READ.items()
        }
        return synthetic | {MODEL: partial(_model_step, self._model)}


def burst(step: Step, cache: DynamicCache, length: int, count: int, moved: Callable[[], int] = int) -> Sample:
    """Times `count` steps in a row, then takes their tokens back.

    One step goes before them, so that what is fetched ahead while nothing computes is not counted in our favour.

    Args:
        step: What to time.
        cache: Holds `length` tokens before and after.
        length: Tokens.
        count: Steps.
        moved: Bytes read so far.
    """
    step(cache, length)

    def steps() -> int:
        before = moved()
        for number in range(1, count + 1):
            step(cache, length + number)
        return moved() - before

    sample = timed(steps)
    cache.crop(-(count + 1))
    return Sample(sample.wall_s / count, sample.cpu_s / count, sample.nbytes // count)


def steps_lasting(seconds: float, step_s: float) -> int:
    """How many steps of about `step_s` seconds to time in a row."""
    return max(1, round(seconds / step_s))


@torch.no_grad()
def _synthetic_step(config: LlamaConfig, work: MatrixWork, count: int, cache: DynamicCache, length: int) -> None:
    new = torch.zeros(state_shape(config, 1), dtype=torch.bfloat16)
    for layer_idx in range(config.num_hidden_layers):
        work(count)
        _touch(*cache.update(new, new, layer_idx))


def _touch(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Looks at every token and head, and holds neither tensor when the next layer begins, as models do not."""
    keys[..., 0].sum()
    values[..., 0].sum()


def _model_step(model: LlamaForCausalLM, cache: DynamicCache, length: int) -> None:
    forward(model, cache, torch.tensor([[1]]), length)
