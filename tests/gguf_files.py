"""A tiny Hugging Face checkpoint becomes a GGUF file, as llama.cpp's converter makes it.

Written from the converter's conventions and the gguf package's table of tensor names, and from nothing in flexdecode:
what the loader believes of a file is tested against this. `convert` also writes into the folder the float values that
the file holds, so that transformers' reading of the folder is the oracle for every type of weight.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from tests.checkpoints import BOS, EOS, PAD, SPECIALS, VOCAB, bytes_to_unicode

Array = np.ndarray[Any, Any]

ARCHITECTURE = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "smollm3": "smollm3",
    "olmo2": "olmo2", "granite": "granite", "gpt_oss": "gpt-oss",
}  # fmt: skip
INTERLEAVED = ("llama", "smollm3", "granite")  # llama.cpp rotates adjacent pairs: LLAMA_ROPE_TYPE_NORM
MERGES = [("t", "h"), ("th", "e")]
MERGED = ["th", "the"]  # ids 260 and 261

# Where the fp16 scales lie in a block that gguf cannot make from floats, and the type's size in elements and bytes.
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


@dataclass(frozen=True)
class Stored:
    """One weight in a GGUF type: `data` has the weight's own leading axes, its last axis is bytes where quantized."""

    data: Array
    kind: Type

    def floats(self) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(self.data, self.kind)))

    def take(self, index: Any) -> Stored:
        """Rows: the next to last axis."""
        return Stored(np.ascontiguousarray(self.data[..., index, :]), self.kind)


def convert(
    folder: Path,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    keys: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
) -> Path:
    """folder/model.gguf, with the matrices in `kind`; `kinds` says otherwise by a part of the Hugging Face name.

    `keys` sets metadata, None leaves a key out; a leading dot stands for the architecture. Vectors, the experts' biases
    and the router stay F32, and a tied head is not written, as in llama.cpp.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURE[config["model_type"]]
    encoded, floats = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        turned = name.endswith(("experts.gate_up_proj", "experts.down_proj"))  # gpt-oss holds them input-major
        matrix = (tensor.transpose(-1, -2) if turned else tensor).float().contiguous()
        encoded[name] = _encode(name, matrix, _kind(name, matrix, kind, kinds or {}))
        values = encoded[name].floats().reshape(matrix.shape)
        floats[name] = (values.transpose(-1, -2) if turned else values).contiguous()
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})

    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    _describe(writer, arch, config)
    if tokenizer:
        _tokenizer(writer)
    for key, value in (keys or {}).items():
        _set(writer, arch + key if key.startswith(".") else key, value)
    for name, stored in {**_arrange(encoded, arch, config), **_frequencies(config)}.items():
        writer.add_tensor(name, stored.data, raw_dtype=stored.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(name: str, matrix: torch.Tensor, kind: str, kinds: Mapping[str, str]) -> Type:
    if matrix.dim() == 1 or name.endswith(("bias", "mlp.gate.weight", "moe.gate.weight", "router.weight")):
        return Type.F32
    return Type[next((k for part, k in kinds.items() if part in name), kind)]


def _encode(name: str, matrix: torch.Tensor, kind: Type) -> Stored:
    values = matrix.numpy()
    if kind.name not in SCALES_AT:
        return Stored(np.ascontiguousarray(gguf.quants.quantize(values, kind)), kind)
    # No quantizer: random blocks are as good a test, with scales that make weights of the usual size.
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(name))
    blocks = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    for at in SCALES_AT[kind.name]:
        scale = rng.uniform(0.5, 1.0, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    floats = gguf.quants.dequantize(blocks, kind)
    factor = values.std() / floats.std()
    for at in SCALES_AT[kind.name]:
        scale = (blocks[:, at : at + 2].copy().view(np.float16) * factor).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return Stored(blocks.reshape(*values.shape[:-1], -1), kind)


def _arrange(encoded: Mapping[str, Stored], arch: str, config: Mapping[str, Any]) -> dict[str, Stored]:
    """Hugging Face names and order of rows to GGUF's."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    arranged: dict[str, Stored] = {}
    experts: dict[str, dict[int, Stored]] = {}
    for name, stored in encoded.items():
        module = name.split(".")[-2] if "." in name else name
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if arch in INTERLEAVED and module in heads:
            stored = _interleave(stored, heads[module])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            stored = Stored(stored.data + 1, stored.kind)
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name)
        if expert:
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = stored
        elif name.endswith("gate_up_proj"):
            for part, first in (("gate", 0), ("up", 1)):
                arranged[name.replace("gate_up_proj", f"{part}_proj.weight")] = stored.take(slice(first, None, 2))
        elif name.endswith("gate_up_proj_bias"):
            for part, first in (("gate", 0), ("up", 1)):
                new = name.replace("gate_up_proj_bias", f"{part}_proj.bias")
                arranged[new] = Stored(np.ascontiguousarray(stored.data[:, first::2]), stored.kind)
        else:
            name = re.sub(r"down_proj_bias$", "down_proj.bias", name)
            arranged[name + ".weight" if name.endswith(("down_proj", "sinks")) else name] = stored
    for name, parts in experts.items():
        stacked = np.stack([parts[e].data for e in range(len(parts))])
        merged = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe", r"\1.feed_forward", name)
        arranged[merged] = Stored(stacked, parts[0].kind)
    names = gguf.get_tensor_name_map(
        next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == arch), config["num_hidden_layers"]
    )
    result = {}
    for name, stored in arranged.items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, f"gguf has no name for {name} in {arch}"
        result[new] = stored
    assert len(result) == len(arranged)
    return result


def _interleave(stored: Stored, heads: int) -> Stored:
    """Row i of the first half of a head beside row i of its second half."""
    rows = stored.data.shape[0]
    order = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
    return Stored(np.ascontiguousarray(stored.data[order]), stored.kind)


def _ropes(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of the full layers and of the sliding ones."""
    rope = config["rope_parameters"]
    return rope.get("full_attention", rope), rope.get("sliding_attention", {})


def _frequencies(config: Mapping[str, Any]) -> dict[str, Stored]:
    """Divisors of the rotary frequencies, which the converter writes as tensors."""
    rope, _ = _ropes(config)
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{n}.weight": Stored(np.array(rope[f"{n}_factor"], np.float32), Type.F32)
            for n in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    dim, theta = config["head_dim"], rope["rope_theta"]
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    divisors = []
    for i in range(0, dim, 2):
        turns = old / (2 * math.pi * theta ** (i / dim))  # in the original context
        smooth = min(max((turns - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": Stored(np.array(divisors, np.float32), Type.F32)}


def _describe(writer: gguf.GGUFWriter, arch: str, c: Mapping[str, Any]) -> None:
    rope, local = _ropes(c)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if arch not in ("granite", "phi3"):
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
    if arch != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if arch in INTERLEAVED:
        writer.add_vocab_size(c["vocab_size"])
        writer.add_rope_dimension_count(c["head_dim"])
    experts = c.get("num_local_experts", c.get("num_experts"))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c["num_experts_per_tok"])
    if arch in ("qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(c["moe_intermediate_size" if arch == "qwen3moe" else "intermediate_size"])
    if arch in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(c["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(c["attention_multiplier"])
        writer.add_embedding_scale(c["embedding_multiplier"])
        writer.add_residual_scale(c["residual_multiplier"])
        writer.add_logit_scale(c["logits_scaling"])
    if arch == "phi3":
        _describe_phi3(writer, c, rope)
    elif rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _describe_phi3(writer: gguf.GGUFWriter, c: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    original = rope.get("original_max_position_embeddings", c["original_max_position_embeddings"])
    writer.add_rope_scaling_orig_ctx_len(original)
    turning = int(rope.get("partial_rotary_factor", 1.0) * c["hidden_size"]) // c["num_attention_heads"]
    writer.add_rope_dimension_count(turning)
    writer.add_sliding_window(c["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        scale = c["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    """tests.checkpoints.byte_tokenizer, and two merged tokens."""
    alphabet = bytes_to_unicode()
    tokens = [alphabet[b] for b in range(256)] + SPECIALS + MERGED
    types = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * 2
    padding = range(len(tokens), VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in padding])
    writer.add_token_types(types + [gguf.TokenType.UNUSED for _ in padding])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)


def _set(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
