"""Prefix reuse: only what is new is computed, and the text is what it would be without."""

import copy
import logging

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DynamicCache,
    GenerationConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    pipeline,
)

import nvme_cache
from nvme_cache import ConfigurationError, ShardCorruptedError, SnapshotStore
from nvme_cache.arguments import cache_argument

from .conftest import prompt, tiny_hybrid, tiny_model
from .test_cli import model_folder  # noqa: F401  (a fixture)

OPTIONS = {"block_size": 16, "host_budget": 0}
MODELS = {"llama": tiny_model, "gemma3": lambda: tiny_model("gemma3"), "hybrid": tiny_hybrid}


class Counted:
    """A model that generates, and how many tokens each call made it process before the first new one."""

    def __init__(self, model):
        self.model = model
        self.prefilled = []
        self._new = True
        self._handle = model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module, args, output):
        if self._new:
            self.prefilled.append(args[0].shape[1])
            self._new = False

    def __call__(self, ids, **options):
        self._new = True
        torch.manual_seed(3)
        return self.model.generate(ids, **{"max_new_tokens": 20, "do_sample": False} | options)


def fresh(model, ids, **options):
    """What transformers makes of it, in a model that nothing was enabled for."""
    model = copy.copy(model)
    for name in ("generate", "_nvme_cache_switches"):
        vars(model).pop(name, None)
    torch.manual_seed(3)
    options = {"max_new_tokens": 20, "do_sample": False} | options
    return model.generate(ids, **{cache_argument(model): DynamicCache(config=model.config)}, **options)


def extended(ids, length, start=0):
    return torch.cat([ids, prompt(length + start, ids.shape[0])[:, start:]], dim=1)


@pytest.fixture
def enabled(offload_dir):
    """Enables reuse for a model until the test ends; nothing is left then."""
    switches = []

    def enable(model, reuse=True, **options):
        switches.append(nvme_cache.enable(model, reuse=reuse, offload_dir=offload_dir, **OPTIONS | options))
        return Counted(model)

    yield enable
    for switch in switches:
        switch.disable()
    assert list(offload_dir.iterdir()) == []


@pytest.mark.parametrize("kind", MODELS)
def test_each_turn_computes_only_what_is_new(kind, enabled, caplog):
    model = MODELS[kind]()
    counted, ids = enabled(model), prompt(70)
    with caplog.at_level(logging.INFO, "nvme_cache"):
        for _ in range(4):
            turn = counted(ids)
            assert torch.equal(turn, fresh(model, ids))
            ids = extended(turn, 9)
    # The last token of an answer was never given to the model.
    assert counted.prefilled == [70, 10, 10, 10]
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("reused")]
    assert said[0] == "reused none of 70 prompt tokens"
    assert said[1] == "reused 89 of 99 prompt tokens from the last call"


def test_an_edit_of_the_history_keeps_exactly_what_comes_before_it(enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    counted(ids)
    for at in (40, 69, 3, 0):
        edited = ids.clone()
        edited[0, at] = (edited[0, at] + 1) % 250
        assert torch.equal(counted(edited), fresh(model, edited))
        assert counted.prefilled[-1] == 70 - at
        counted(ids)
    assert torch.equal(counted(ids[:, :50]), fresh(model, ids[:, :50]))
    assert counted.prefilled[-1] == 1  # its last token must be computed


@pytest.mark.parametrize("kind", ["gemma3", "hybrid"])
def test_layers_that_cannot_step_back_are_reused_whole_or_not_at_all(kind, enabled):
    model = MODELS[kind]()
    counted, ids = enabled(model), prompt(70)
    turn = counted(ids)
    edited = extended(turn, 9)
    edited[0, 80] += 1
    assert torch.equal(counted(edited), fresh(model, edited))
    assert counted.prefilled == [70, 99]
    assert torch.equal(counted(edited), fresh(model, edited))
    assert counted.prefilled[-1] == 99


def test_batches_are_reused_if_their_padding_is_the_same(enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70, 2)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    turn = counted(ids, attention_mask=mask)
    longer, longer_mask = extended(turn, 9), torch.nn.functional.pad(mask, (0, 29), value=1)
    assert torch.equal(counted(longer, attention_mask=longer_mask), fresh(model, longer, attention_mask=longer_mask))
    assert counted.prefilled == [70, 10]
    other_mask = longer_mask.clone()
    other_mask[1, 20:22] = 0
    assert torch.equal(counted(longer, attention_mask=other_mask), fresh(model, longer, attention_mask=other_mask))
    assert counted.prefilled[-1] == 99 - 20
    assert torch.equal(counted(longer[1:]), fresh(model, longer[1:]))
    assert counted.prefilled[-1] == 99  # another number of rows


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True},
        {"prefill_chunk_size": 7},
    ],
    ids=str,
)
def test_every_way_of_decoding_goes_on_from_what_is_held(options, enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    turn = counted(ids)
    longer = extended(turn, 9)
    for _ in range(2):
        assert torch.equal(counted(longer, **options), fresh(model, longer, **options))
        assert counted.prefilled[-1] <= 10  # in chunks, the first of them
    assert torch.equal(counted(longer), fresh(model, longer))
    assert counted.prefilled[-1] <= 10


def test_drafted_candidates_begin_anew_and_are_gone_on_from(enabled):
    """`generate` processes the whole prompt with them, even what is cached."""
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    longer = extended(counted(ids), 9)
    answer = counted(longer, prompt_lookup_num_tokens=3)
    assert torch.equal(answer, fresh(model, longer))
    longer = extended(answer, 9)
    assert torch.equal(counted(longer), fresh(model, longer))
    assert counted.prefilled[0] == 70 and counted.prefilled[2] <= 13


def test_more_than_tokens_is_never_compared(enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    counted(ids)
    embedded = {"inputs_embeds": model.get_input_embeddings()(ids) * 1.5}
    assert torch.equal(model.generate(**embedded, max_new_tokens=9), fresh(model, None, **embedded, max_new_tokens=9))
    positions = torch.arange(3, 73)[None]
    assert torch.equal(counted(ids, position_ids=positions), fresh(model, ids, position_ids=positions))
    assert counted.prefilled[-1] == 70


def test_a_call_that_fails_leaves_nothing_wrong_behind(enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    turn = extended(counted(ids), 9)

    class StopError(Exception):
        pass

    def stop(*_):
        raise StopError

    handle = model.model.layers[2].register_forward_hook(stop)
    with pytest.raises(StopError):
        counted(turn)
    handle.remove()
    assert torch.equal(counted(turn), fresh(model, turn))


def test_a_cache_in_the_output_is_the_callers(enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    output = counted(ids, return_dict_in_generate=True)
    held = getattr(output, cache_argument(model))
    longer = extended(output.sequences, 9)
    assert torch.equal(counted(longer), fresh(model, longer))
    assert counted.prefilled == [70, 10]
    assert held.get_seq_length() == 89
    held.close()


def test_options_count_wherever_they_are_said(enabled):
    model = tiny_model()
    model.generation_config.num_beams = 3
    counted, ids = enabled(model), prompt(70)
    ids[0, :5] = 0
    short = {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=False)}
    counted(ids, num_beams=1, attention_mask=(ids != 0).long())
    assert torch.equal(model.generate(ids, **short), model.generate(ids, short["generation_config"], num_beams=3))
    model.generation_config.num_beams = 1
    model.generate(ids, **short)  # takes the first tokens for padding, as the model's own config says
    seen = {"attention_mask": torch.ones_like(ids)}
    assert torch.equal(counted(ids, **seen), fresh(model, ids, **seen))


def test_no_cache_is_no_argument(enabled):
    model, ids = tiny_model(), prompt(70)
    counted = enabled(model)
    assert torch.equal(counted(ids, **{cache_argument(model): None}), fresh(model, ids))


@pytest.mark.parametrize("change", ["scaled", "one number", "dtype"])
def test_other_weights_reuse_nothing(change, enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    counted(ids)
    weight = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        if change == "scaled":
            weight.mul_(3)
        elif change == "one number":
            weight.view(-1)[1] = 90
        else:
            model.to(torch.bfloat16)
    assert torch.equal(counted(ids), fresh(model, ids))
    assert counted.prefilled == [70, 70]


def test_a_copied_model_reuses_what_is_its_own(enabled):
    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    counted(ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.v_proj.weight.mul_(3)
    assert torch.equal(other.generate(ids, max_new_tokens=20, do_sample=False), fresh(other, ids))
    vars(other)["_nvme_cache_switches"][-1].disable()
    assert torch.equal(counted(ids), fresh(model, ids))
    assert counted.prefilled == [70, 1]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_that_depend_on_the_length_are_not_reused_for_another(kind, enabled):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    model = tiny_model(rope_parameters=rope, max_position_embeddings=64 if kind == "dynamic" else 256)
    counted, ids = enabled(model), prompt(100)
    counted(ids[:, :30])
    counted(ids[:, :40])
    counted(ids)
    counted(ids[:, :40], max_new_tokens=1)
    assert counted.prefilled == [30, 10, 100, 40]


def test_an_answer_decoded_by_the_caller_is_given_and_not_kept(enabled):
    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        cache = kwargs[cache_argument(model)]
        for _ in range(3):
            new = input_ids[:, cache.get_seq_length() :]
            logits = model(new, **{cache_argument(model): cache}, use_cache=True).logits
            input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)
        return input_ids

    model = tiny_model()
    counted, ids = enabled(model), prompt(70)
    for _ in range(2):
        assert torch.equal(counted(ids, custom_generate=decode), fresh(model, ids, max_new_tokens=3))
    assert counted.prefilled == [70, 70]


def test_positions_that_an_image_shifted_are_not_gone_on_with(enabled):
    """Qwen-VL keeps in itself by how much the last prompt's image shifted positions."""
    torch.manual_seed(0)
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    special = {"image_token_id": 290, "vision_start_token_id": 291, "vision_end_token_id": 292, "video_token_id": 293}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special)).eval()
    model.generation_config.eos_token_id = None
    counted, ids = enabled(model), prompt(60)
    longer = extended(counted(ids), 9)
    assert torch.equal(counted(longer), fresh(model, longer))
    model.model.rope_deltas = torch.tensor([[-9]])
    assert torch.equal(counted(longer), fresh(model, longer))
    assert counted.prefilled == [60, 10, 89]


def test_reuse_must_be_one_of_its_kinds():
    with pytest.raises(ConfigurationError, match="must be True, False or a SnapshotStore"):
        nvme_cache.enable(tiny_model(), reuse="/mnt")


def test_a_chat_through_a_pipeline_computes_only_each_new_turn(model_folder, enabled):  # noqa: F811
    pipe = pipeline("text-generation", model=str(model_folder), device="cpu")
    counted = enabled(pipe.model)
    chat = [{"role": "user", "content": "What are the two chambers of Congress?"}]
    lengths = []
    for question in ("Who elects them?", "For how long?", "Why?"):
        counted._new = True
        answer = pipe(chat, max_new_tokens=8, do_sample=False)[0]["generated_text"]
        chat = [*answer, {"role": "user", "content": question}]
        ids = pipe.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        lengths.append(ids["input_ids"].shape[1])
    assert counted.prefilled[0] > counted.prefilled[1]
    assert all(count < length / 2 for count, length in zip(counted.prefilled[1:], lengths, strict=False))


class TestStore:
    @pytest.mark.parametrize("quantization", [None, "int8"])
    @pytest.mark.parametrize("kind", MODELS)
    def test_another_process_goes_on_from_what_one_computed(self, kind, quantization, enabled, tmp_path, caplog):
        model = MODELS[kind]()
        options = {"quantization": quantization}
        store = SnapshotStore(tmp_path / "store", size_limit="1GB")
        ids = prompt(70)
        turn = enabled(model, store, **options)(ids)
        longer = extended(turn, 9)
        expected = enabled(MODELS[kind](), True, **options)
        expected(ids)
        other = enabled(MODELS[kind](), SnapshotStore(tmp_path / "store", size_limit="1GB"), **options)
        with caplog.at_level(logging.INFO, "nvme_cache"):
            assert torch.equal(other(longer), expected(longer))
        assert other.prefilled == [10]
        assert "reused 89 of 99 prompt tokens from the snapshot" in caplog.text

    def test_other_weights_and_other_formats_are_not_mistaken_for_it(self, enabled, tmp_path):
        store, ids = SnapshotStore(tmp_path / "store", size_limit="1GB"), prompt(70)
        enabled(tiny_model(), store)(ids)
        other = tiny_model()
        with torch.no_grad():
            other.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        counted = enabled(other, store)
        assert torch.equal(counted(ids), fresh(other, ids))
        assert counted.prefilled == [70]
        counted = enabled(tiny_model(), store, quantization="int8")
        counted(ids)
        assert counted.prefilled == [70]

    def test_reading_that_takes_longer_than_computing_is_left(self, enabled, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr(SnapshotStore, "drive", nvme_cache.drive.Drive(read_bytes_per_s=1.0))
        store, ids = SnapshotStore(tmp_path / "store", size_limit="1GB"), prompt(70)
        enabled(tiny_model(), store)(ids)
        counted = enabled(tiny_model(), store)
        with caplog.at_level(logging.INFO, "nvme_cache"):
            counted(ids)
        assert counted.prefilled == [70]
        assert "recomputing" in caplog.text

    def test_a_damaged_snapshot_fails_one_call_only(self, enabled, tmp_path):
        model, ids = tiny_model(), prompt(70)
        store = SnapshotStore(tmp_path / "store", size_limit="1GB")
        enabled(model, store)(ids)
        for path in (tmp_path / "store").rglob("layer-001-*"):
            damaged = bytearray(path.read_bytes())
            damaged[5000] ^= 1
            path.write_bytes(damaged)
        counted = enabled(model, SnapshotStore(tmp_path / "store", size_limit="1GB"))
        with pytest.raises(ShardCorruptedError):
            counted(ids)
        assert torch.equal(counted(ids), fresh(model, ids))
        assert counted.prefilled[-1] == 70
        assert len(store.entries()) == 1

    def test_states_that_make_no_sense_match_nothing(self, enabled, tmp_path):
        model, ids = tiny_model(), prompt(70)
        store = SnapshotStore(tmp_path / "store", size_limit="1GB")
        enabled(model, store)(ids)
        for path in (tmp_path / "store").rglob("states-*"):
            save_file({"token_ids": torch.zeros(3), "attention_mask": torch.zeros(7, 2)}, path)
        assert torch.equal(enabled(model, store)(ids), fresh(model, ids))

    def test_exact_and_quantized_snapshots_have_names_of_their_own(self, enabled, tmp_path):
        model, ids = tiny_model(), prompt(70)
        store = SnapshotStore(tmp_path / "store", size_limit="1GB")
        for quantization in (None, "int8"):
            enabled(model, store, quantization=quantization)(ids)
        first, second = (entry.name for entry in store.entries())
        assert first != second and store.remove(first)
