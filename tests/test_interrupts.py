"""Ctrl-C at any line of the package leaves the cache as it was before the forward, able to go on, hanging nowhere."""

import linecache
import sys
from pathlib import Path

import pytest
import torch

import nvme_cache

from .conftest import stock_for

PACKAGE = str(Path(nvme_cache.__file__).parent)
LAYERS = 2


def interrupted_at(line, function):
    """Calls `function` with a KeyboardInterrupt at the `line`-th line run in the package; False if it ended before."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        # A `with` is traced once more when it ends, before it lets go; a signal never comes just there.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(
            "with"
        ):
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("length", [1, 20])  # a token, and enough to seal and to write
@pytest.mark.parametrize(("tier", "quantization"), [("nvme", None), ("host", None), ("nvme", "int8")])
def test_an_interrupt_at_any_line(length, tier, make_cache):
    history, recent, new = (torch.randn(LAYERS, 2, 1, 2, tokens, 8) for tokens in (36, 11, length))
    cache = make_cache(block_size=16, host_budget=(1 << 30) if tier == "host" else 0, prefetch_depth=1)
    stock = stock_for(cache)
    for layer_idx in range(LAYERS):
        for states in (history, recent, new):
            expected = stock.update(*states[layer_idx], layer_idx)

    class Model(torch.nn.Module):
        def forward(self, cache, states):
            for layer_idx in range(LAYERS):
                returned = cache.update(*states[layer_idx], layer_idx)
            return returned

    model = Model()

    def forward(cache):
        return model(cache, new)

    model(cache, history)
    forward(cache)  # ends the first forward, and makes the slots
    line, more = 1, True
    with torch.no_grad():
        while more:
            cache.crop(0)  # takes back what an interrupt after the last layer left in doubt
            cache.crop(36 - cache.get_seq_length())
            model(cache, recent)
            more = interrupted_at(line, lambda: forward(cache))
            if more and [layer.get_seq_length() for layer in cache.layers] != [47 + length] * LAYERS:
                try:
                    returned = forward(cache)
                except nvme_cache.CacheMisuseError as error:
                    assert "call the model again" in str(error)
                    returned = forward(cache)
                assert all(map(torch.equal, returned, expected)), line
            lengths = [cache.get_seq_length(layer_idx) for layer_idx in range(LAYERS)]
            assert lengths == [47 + length] * LAYERS, line
            assert torch.equal(cache.layers[0].keys, stock.layers[0].keys), line
            line += 3
    assert line > 200
