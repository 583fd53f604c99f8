"""A GGUF file becomes a model folder with the same weights and tokens."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rllib_exgrpo.gguf import convert

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate")

HEADS, KV_HEADS, LAYERS = 4, 2, 2
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def interleaved(weight, heads):
    """Orders the rows of each head as GGUF does: halves take turns."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, rope_theta=5e4,
        max_position_embeddings=128, rms_norm_eps=1e-5,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype="float32")


@pytest.fixture
def file(model, tmp_path):
    """The model as GGUF, with a token for each byte, one for "ab" and an end token."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "ab", "<end>"])
    writer.add_token_types([1] * 257 + [3])  # 3: a control token
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        for heads, kind in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
            weight = interleaved(weight, heads) if kind in name else weight
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_and_tokens_survive(model, file, tmp_path):
    folder = tmp_path / "models" / "tiny"
    convert(file, folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == torch.float32
    weights = again.state_dict()
    for name, weight in model.state_dict().items():
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab b<end>").input_ids[0] == 256
    assert tokenizer.decode(tokenizer("ab 7²").input_ids) == "ab 7²"
    assert tokenizer.eos_token_id == 257
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_what_is_there_is_kept_unless_asked(file, tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        convert(file, folder)
    assert [path.name for path in folder.iterdir()] == ["notes"]
    convert(file, folder, overwrite=True)
    assert (folder / "config.json").is_file()
    assert not (folder / "notes").exists()
