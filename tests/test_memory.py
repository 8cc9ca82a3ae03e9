"""Memory is bounded by slots, tails and budgets: measured in processes of their own."""

import os
import resource
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import LlamaConfig

TOKENS = 32768

PEAK = """
    import sys
    from pathlib import Path
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    from nvme_cache import OffloadedNVMeCache

    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    kind, num_layers, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=8,
                         num_key_value_heads=8, head_dim=64, vocab_size=256, max_position_embeddings=65536)
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)

    @torch.inference_mode()
    def run(cache, tokens):
        # Most of the context is put there directly, since only its size matters here; then the model goes on with it.
        states = torch.randn(2, 1, 8, 8192, 64).to(torch.bfloat16)
        for _ in range(tokens // 8192):
            for layer_idx in range(num_layers):
                cache.update(*states, layer_idx)
        for _ in range(4):
            model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == tokens + 4

    run(DynamicCache(config=config), 8192)  # warms what the model itself needs
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    if kind == "stock":
        run(DynamicCache(config=config), int(sys.argv[4]))
    else:
        with OffloadedNVMeCache(config=config, offload_dir=folder, device_budget=0, host_budget=0) as cache:
            run(cache, int(sys.argv[4]))
    print(status("VmHWM") - before)
"""


def peak_bytes(kind, num_layers, folder):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PEAK), kind, num_layers, folder, TOKENS]
    # By default glibc keeps some of what was freed, more or less by chance, and it would count as the model's own.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_peak_memory_is_a_fifth_of_the_stock_caches_and_independent_of_depth(offload_dir):
    stock = peak_bytes("stock", 24, offload_dir)
    ours = peak_bytes("ours", 24, offload_dir)
    twice = peak_bytes("ours", 48, offload_dir)
    assert stock > 24 * TOKENS * 2048  # what 24 layers of this shape hold
    assert ours < 0.20 * stock
    assert twice < 1.05 * ours


@pytest.mark.parametrize("on_host", [False, True])
def test_a_decode_step_allocates_no_memory_that_grows_with_context(on_host, make_cache):
    """Minor page faults tell: fresh memory is touched for the first time, reused memory is not."""
    config = LlamaConfig(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=64)

    @torch.inference_mode()
    def faults_per_step(tokens):
        cache = make_cache(config=config, host_budget=(1 << 40) if on_host else 0)
        for layer_idx in range(8):
            cache.update(*torch.randn(2, 1, 8, tokens, 64).to(torch.bfloat16), layer_idx)
        one = torch.randn(2, 1, 8, 1, 64).to(torch.bfloat16)
        counts = []
        for _ in range(12):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for layer_idx in range(8):
                cache.update(*one, layer_idx)
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        cache.close()
        return sorted(counts[4:])[4]

    short, long = faults_per_step(2048), faults_per_step(16384)
    layer_pages = 16384 * 2048 // 4096  # what copying one layer into fresh memory would touch
    assert long <= short + 50 < layer_pages / 100


FLAT = """
    import gc, os, sys, threading
    from pathlib import Path
    import psutil
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from nvme_cache import OffloadedNVMeCache

    folder, process = Path(sys.argv[1]), psutil.Process()
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=64,
                         vocab_size=256, eos_token_id=None)
    model = LlamaForCausalLM(config).eval()

    def used():
        gc.collect()
        disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return process.num_fds(), threading.active_count(), disk, process.memory_info().rss

    for call in range(50):
        cache = OffloadedNVMeCache(config=config, offload_dir=folder, block_size=64, host_budget=0)
        output = model.generate(torch.randint(3, 250, (1, 1024)), past_key_values=cache, max_new_tokens=4,
                                return_dict_in_generate=True)
        assert output.past_key_values.get_seq_length() == 1027
        del cache, output
        if call == 9:
            before = used()
    after = used()
    assert after[:3] == before[:3], (before, after)
    print(after[3] - before[3])
"""


def test_fifty_generates_leave_nothing_behind(offload_dir):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FLAT), str(offload_dir)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
    assert run.returncode == 0, run.stderr
    one_cache = 2 * 1024 * 4 * 64 * 2 * 4  # layers, tokens, heads, width, keys and values, bytes
    assert int(run.stdout) < 2 * one_cache  # of the forty made in between


def test_nothing_in_the_package_concatenates_history():
    from pathlib import Path

    import nvme_cache

    for path in Path(nvme_cache.__file__).parent.glob("*.py"):
        if path.name != "demo.py":  # which joins prompts
            assert "torch.cat" not in path.read_text()


def test_slots_and_tails_are_all_that_stays_in_memory(make_cache):
    cache = make_cache(block_size=64)
    for layer_idx in range(6):
        cache.update(*torch.randn(2, 1, 2, 1000, 16), layer_idx)
    usage = cache.memory_usage()
    assert usage == {"device": 6 * (1000 % 64) * 256, "host": 0, "nvme": 6 * (1000 // 64 * 64) * 256}
