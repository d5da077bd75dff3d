"""Typed reading of a Hugging Face config, in which nothing is passed over in silence.

transformers' own config class supplies the defaults, the layer types and one spelling of the rope parameters, so a
key that is absent means here what it means there. A key that changes arithmetic and that nobody here asked for is an
error that names it. Knows no family and no tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Keys that change no logit in inference: names, training only, bookkeeping of other programs.
INERT = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range attention_dropout
    resid_pdrop embd_pdrop hidden_dropout classifier_dropout bos_token_id eos_token_id pad_token_id auto_map
    _name_or_path quantization_config pretraining_tp router_aux_loss_coef output_router_logits router_jitter_noise
    cache_implementation max_window_layers use_sliding_window id2label label2id problem_type return_dict
    output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder is_decoder
    _sliding_window_pattern sliding_window_pattern _attn_implementation attn_implementation compression_config
    unsloth_version unsloth_fixed use_bfloat16 torchscript tokenizer_class task_specific_params initial_context_length
    model_max_length pad_id
    _commit_hash sep_token_id prefix finetuning_task
    default_theta base_model_tp_plan base_model_pp_plan tie_encoder_decoder""".split()
)
_ROPE_KEYS = frozenset(
    """rope_theta rope_scaling rope_parameters rope_local_base_freq partial_rotary_factor
    original_max_position_embeddings""".split()
)


class ConfigReader:
    """Reads keys with transformers' defaults and remembers which; `finish` refuses what was left unread."""

    def __init__(self, raw: Mapping[str, Any], where: str, ignore: Collection[str] = ()) -> None:
        self.raw, self.where, self._ignore = raw, where, frozenset(ignore)
        self._read: set[str] = set()
        self.model_type = str(raw.get("model_type"))
        try:
            self._class = CONFIG_MAPPING[self.model_type]
            self._config = self._class(**_normalized(raw))
        except Exception as problem:  # the config classes raise a zoo of types; all of them mean a bad config
            detail = " ".join(str(problem).split())
            raise ValueError(f"{where}: transformers refuses this {self.model_type} config: {detail}") from problem

    def __call__(self, key: str) -> Any:
        """The value of `key`, transformers' default where the file has none."""
        self._read.add(key)
        return getattr(self._config, key, None)

    def finish(self) -> None:
        """Raise for every key that says something that nobody here has understood."""
        known = set(getattr(self._class, "__dataclass_fields__", ())) | set(self._class.attribute_map)
        known |= set(self._class.attribute_map.values())
        aliases = {v: k for k, v in self._class.attribute_map.items()} | dict(self._class.attribute_map)
        handled = self._read | INERT | _ROPE_KEYS | self._ignore
        defaults = None
        for key, value in self.raw.items():
            if key in handled or aliases.get(key) in handled or not value:
                continue
            if key in known:
                defaults = defaults or self._class()
                if getattr(defaults, key, None) == value:
                    continue
            raise ValueError(
                f"{self.where}: config key {key!r} = {value!r} is not understood for {self.model_type} and may change "
                f"the arithmetic; if you know that it does not, pass ignore_config=[{key!r}] (--ignore-config {key})"
            )


def _normalized(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the one rope spelling that transformers reads in every version: legacy names of longrope, and
    its original length moved to where the type is read."""
    config = {k: v for k, v in raw.items() if k != "quantization_config"}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if not isinstance(rope, dict):
            continue
        if not rope:
            del config[key]
            continue
        nested = all(isinstance(v, dict) for v in rope.values())
        fixed = {k: _fix_rope(v, raw) for k, v in rope.items()} if nested else _fix_rope(rope, raw)
        config[key] = fixed
    return config


def _fix_rope(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    fixed = dict(rope)
    kind = fixed.get("rope_type", fixed.get("type"))
    if kind in ("su", "longrope"):
        fixed["type"] = fixed["rope_type"] = "longrope"
        original = raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
        if original is not None:
            fixed.setdefault("original_max_position_embeddings", original)
    return fixed
