"""transformers' own layers inside our cache: sliding windows, linear attention and others that stay resident.

Their classes differ from model to model, so they are handled through their attributes alone.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .errors import ConfigurationError

Tensors: TypeAlias = dict[str, torch.Tensor]


def undo_of(layer: Any) -> Callable[[], None]:
    """What takes the next update of an attention layer back: such layers replace tensors, never write into them."""
    state = dict(vars(layer))
    return lambda: vars(layer).update(state)


def can_step_back(layer: Any) -> bool:
    """Whether `crop` would take a layer back to what it was some tokens ago; where not, it raises."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) or not getattr(layer, "is_croppable", True):
        return False
    # A window that has begun to slide has dropped what it would need again.
    return not layer.is_sliding or bool(layer.get_seq_length() < layer.sliding_window)


def batch_size_of(layer: Any) -> int | None:
    """How many batch rows a layer holds; None if it holds nothing."""
    held: list[torch.Tensor | None] = [layer.keys] if hasattr(layer, "keys") else []
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        held += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return next((states.shape[0] for states in held if states is not None and states.numel()), None)


def move(layer: Any, device: torch.device) -> None:
    """Moves all that a layer holds to `device`."""

    def moved(value: Any) -> Any:
        match value:
            case torch.Tensor():
                return value.to(device)
            case torch.device():
                return device
            case dict():
                return {key: moved(each) for key, each in value.items()}
        return value

    vars(layer).update(moved(dict(vars(layer))))


def state_of(layer: Any, prefix: str, tensors: Tensors) -> dict[str, Any]:
    """A layer's attributes as JSON can hold them.

    Args:
        layer: The layer.
        prefix: What the names of its tensors begin with.
        tensors: Where its tensors go, each contiguous and by itself.

    Raises:
        ConfigurationError: an attribute of a kind that cannot be stored.
    """

    def plain(value: Any, name: str) -> Any:
        match value:
            case torch.Tensor():
                tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
                return {"tensor": name}
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": None}
            case dict() if all(isinstance(key, (int, str)) for key in value):
                return {"dict": [[key, plain(each, f"{name}.{key}")] for key, each in value.items()]}
            case list() | tuple():
                kind = "list" if isinstance(value, list) else "tuple"
                return {kind: [plain(each, f"{name}.{at}") for at, each in enumerate(value)]}
            case None | bool() | int() | float() | str():
                return {"value": value}
        raise ConfigurationError(
            f"a cache with a layer of kind {type(layer).__name__} cannot be saved: its {name.rpartition('.')[2]} is a "
            f"{type(value).__name__}"
        )

    return {name: plain(value, f"{prefix}.{name}") for name, value in vars(layer).items()}


def restore_state(layer: Any, state: dict[str, Any], tensors: Tensors, device: torch.device) -> None:
    """Gives a fresh layer the attributes that `state_of` stored.

    Args:
        layer: A layer of the same class.
        state: What `state_of` returned.
        tensors: The tensors it names.
        device: Where they go.

    Raises:
        ValueError: `state` is not what `state_of` makes of such a layer.
    """

    def value_of(entry: Any) -> Any:
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ValueError(f"{entry!r} describes no value")
        ((kind, content),) = entry.items()
        match kind, content:
            case "tensor", str() if content in tensors:
                return tensors[content].to(device, copy=True)
            case "dtype", str() if isinstance(getattr(torch, content, None), torch.dtype):
                return getattr(torch, content)
            case "device", None:
                return device
            case "dict", list() if all(isinstance(each, list) and len(each) == 2 for each in content):
                return {key: value_of(each) for key, each in content if isinstance(key, (int, str))}
            case "list", list():
                return [value_of(each) for each in content]
            case "tuple", list():
                return tuple(value_of(each) for each in content)
            case "value", None | bool() | int() | float() | str():
                return content
        raise ValueError(f"{entry!r} describes no value")

    for name, entry in state.items():
        known = getattr(type(layer), name, None)
        if name.startswith("__") or callable(known) or isinstance(known, property):
            raise ValueError(f"{type(layer).__name__} has no state called {name!r}")
        setattr(layer, name, value_of(entry))
