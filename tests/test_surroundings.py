"""What others put around a model: accelerate's hooks, compiled graphs, tokens that an adapter puts first."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import DynamicCache

import nvme_cache
from nvme_cache.arguments import cache_argument

from .conftest import prompt, tiny_model, tokens


def dispatched(model):
    """Without telling accelerate to leave the cache alone, as a hand-made dispatch does."""
    places = {name: "cpu" for name, child in model.named_modules() if not list(child.children())}
    return dispatch_model(model, device_map=places, main_device="cpu", force_hooks=True)


def hooked_everywhere(model):
    for module in list(model.modules()):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))


HOOKS = {
    "dispatched": dispatched,
    "hooked everywhere": hooked_everywhere,
    "weights offloaded": lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_hooks_pass_the_cache_on_untouched(hooks, num_beams, make_cache, monkeypatch):
    model = tiny_model()
    expected = tokens(model, prompt(200), DynamicCache(config=model.config), num_beams=num_beams)
    HOOKS[hooks](model)
    cache = make_cache(config=model.config, block_size=16)
    layers, moved, received = list(cache.layers), [], []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **kwargs: moved.append(args[0]) or to(*args, **kwargs))
    attention = model.model.layers[2].self_attn
    attention.forward = watched(attention.forward, received)
    assert torch.equal(tokens(model, prompt(200), cache, num_beams=num_beams), expected)
    assert received and all(received_cache is cache for received_cache in received)
    assert all(map(lambda now, before: now is before, cache.layers, layers))
    held = num_beams * 200 * cache.layers[0].keys.shape[1] * cache.layers[0].keys.shape[3]  # elements of a layer's keys
    assert all(tensor.ndim < 4 or tensor.numel() < held for tensor in moved)


def watched(forward, received):
    def watching(*args, **kwargs):
        received.extend(kwargs[name] for name in ("cache", "past_key_values") if name in kwargs)
        return forward(*args, **kwargs)

    return watching


@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs_leave_out_what_the_cache_does(make_cache):
    model, traced = tiny_model(num_hidden_layers=2), []

    def watch(graph, _):
        traced.extend(str(node.stack_trace) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=watch)
    caches = make_cache(config=model.config, block_size=16), DynamicCache(config=model.config)
    name, graphs = cache_argument(model), []
    with torch.no_grad():
        for start, end in [(0, 40), *((i, i + 1) for i in range(40, 70))]:
            ids = prompt(70)[:, start:end]
            ours, stock = compiled(ids, **{name: caches[0]}), model(ids, **{name: caches[1]})
            assert torch.equal(ours.logits, stock.logits)
            graphs.append(len(traced))
    assert traced
    assert graphs[-1] == graphs[15]
    ours = [trace for trace in traced if nvme_cache.__path__[0] in trace]
    # Sums of lengths, which masks need, are all that may be there.
    assert all("in get_seq_length" in trace or "in get_mask_sizes" in trace for trace in ours)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "prompt lookup"])
def test_tokens_put_first_by_an_adapter(family, options, make_cache):
    """As PEFT's prefix tuning does: keys and values that no token made, and a mask over all."""
    model = tiny_model(family)
    states = torch.randn(model.config.num_hidden_layers, 2, 1, 2, 40, 16)
    mask = torch.ones(1, 100, dtype=torch.long)
    results = []
    for cache in (
        make_cache(ddp_cache_data=list(states.unbind()), config=model.config, block_size=16),
        DynamicCache(list(states.unbind()), config=model.config),
    ):
        assert cache.get_seq_length() == 40
        results.append(tokens(model, prompt(60), cache, attention_mask=mask, **options))
        assert cache.get_seq_length() == 123
    assert torch.equal(*results)
    assert not torch.equal(results[0], tokens(model, prompt(60), DynamicCache(config=model.config), **options))
