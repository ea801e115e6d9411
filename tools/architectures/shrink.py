"""A configuration of any type made small, by the names of its fields."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

VOCABULARY, HIDDEN, HEADS, HEAD, WIDE = 64, 32, 4, 8, 64

SIZES: tuple[tuple[int, str], ...] = (
    (VOCABULARY, (
        "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size text_vocab_size"
    )),
    (HIDDEN, (
        "hidden_size d_model n_embd dim n_hidden embedding_size attention_hidden_size moe_intermediate_size"
        " lru_width emb_dim embedding_dim input_embedding_size output_embedding_size word_embed_proj_dim"
        " out_hidden_size expert_ffn_hidden_size dense_hidden_size shared_expert_intermediate_size"
        " moe_shared_expert_intermediate_size hidden_size_global projector_input_dim projector_output_dim"
        " backbone_hidden_size ple_embed_dim embed_dim linear_num_feats router_hidden_size dim_model_base"
        " audio_hidden_size text_hidden_size projection_dim"
    )),
    (WIDE, (
        "intermediate_size ffn_dim d_ff ffn_hidden_size n_inner dff dim_ff decoder_ffn_dim encoder_ffn_dim"
        " d_inner intermediate_size_mlp feed_forward_size mlp_dim dense_intermediate_size"
        " shared_intermediate_size mamba_d_ssm max_position_embeddings n_positions n_ctx max_seq_len"
        " max_sequence_length context_length model_max_length original_max_position_embeddings"
        " max_target_positions max_source_positions num_mel_bins"
    )),
    (HEADS, (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"
        " attention_heads linear_num_value_heads swa_num_attention_heads num_experts num_local_experts"
        " n_routed_experts moe_num_experts linear_num_heads num_encoder_attention_heads"
        " num_decoder_attention_heads index_n_heads kv_lora_rank q_lora_rank ssm_state_size mamba_d_state"
        " state_size chunk_size mamba_chunk_size qk_rope_head_dim rotary_dim num_query_groups time_step_rank"
        " mamba_dt_rank laurel_rank adapter_rank conf_num_attention_heads o_lora_rank gated_norm_rank"
        " hc_lowrank d_rel vision_heads conf_attention_context_left linear_num_key_heads num_linear_heads"
    )),
    (2, (
        "num_key_value_heads num_kv_heads kv_n_heads n_head_kv swa_num_key_value_heads num_experts_per_tok"
        " moe_top_k moe_k moe_topk num_experts_per_token top_k_experts n_group n_groups num_expert_group"
        " o_groups mamba_n_groups mamba_ngroups attn_layer_period expert_layer_period n_mamba_groups"
        " num_layers_per_stack layer_group_size global_attn_every_n_layers"
    )),
    (1, (
        "topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace"
        " attn_layer_offset expert_layer_offset num_dense_layers num_mem_blocks moe_layer_start_index"
    )),
    (0, (
        "num_kv_shared_layers"
    )),
    (HEAD, (
        "head_dim v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"
        " index_head_dim attention_head_dim d_kv dim_head swa_head_dim d_head kv_channels mamba_d_head"
        " mamba_head_dim mamba_headdim attention_head_size hidden_size_per_layer_input sliding_window"
        " sliding_window_size index_topk window_size attention_window_size attention_chunk_size"
        " global_head_dim rel_extent keep_window_size mamba_num_heads mamba_n_heads n_mamba_heads"
        " local_attention block_size num_position_embeddings lsh_attn_chunk_length local_attn_chunk_length"
        " index_block_size num_centroids shape_embed_dim pronunciation_embed_dim ngram_vocab_size_base"
        " rel_pos_bins"
    )),
    (16, (
        "image_size crop_size zero_expert_num encoder_hash_byte_group_vocab pronunciation_vocab_size"
        " shape_vocab_size"
    )),
)  # fmt: skip
"""Value, and the fields that get it, wherever a configuration has them."""
SMALL = {name: value for value, names in SIZES for name in names.split()} | {
    "qk_head_dim": HEAD + 4,
    "patch_size": 4,
    "vision_output_dim": HIDDEN,
    "axial_pos_shape": [8, 8],
    "axial_pos_embds_dim": [16, 16],
    "index_topk_blocks": 1,
}
LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers"
    " depth num_blocks vision_layers conf_num_hidden_layers num_global_layers"
).split()
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "sep_token_id": 2}
DROPPED = ("dropout", "pdrop", "dropout_prob", "layerdrop", "dropout_p", "dropout_rate", "drop_path_rate")
NO_NOISE = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False}
MOST_LAYERS = 4


def shrunk(config: PreTrainedConfig, **given: Any) -> PreTrainedConfig:
    """One of `config`'s class with small sizes, no dropout, and one layer of each kind (two at least).

    Fields are told by their names (`SMALL`); the parts of a composite configuration alike. `given` wins.
    """
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    there = set(fields) | set(getattr(config, "attribute_map", {}))
    small: dict[str, Any] = {name: value for name, value in (SMALL | NO_NOISE).items() if fields.get(name) is not None}
    small |= {name: value for name, value in TOKENS.items() if name in fields}
    small |= {name: 0.0 for name, value in fields.items() if isinstance(value, float) and name.endswith(DROPPED)}
    small |= {name: shrunk(value) for name, value in fields.items() if isinstance(value, PreTrainedConfig)}
    if "qk_rope_head_dim" in fields:  # keys are made for every head, of a part that turns and one that does not
        small |= {"num_key_value_heads": HEADS, "head_dim": SMALL["qk_rope_head_dim"]}
    small |= _layers(fields)
    for name, value in fields.items():  # ids of special tokens of a vocabulary that was larger
        if name.endswith(("_token_id", "_token_index")) and name not in TOKENS and isinstance(value, int):
            small[name] = VOCABULARY - 1 - sum(other.endswith(("_token_id", "_token_index")) for other in small) % 16
    return type(config)(**{name: value for name, value in small.items() if name in there} | given)


def _layers(fields: dict[str, Any]) -> dict[str, Any]:
    """How many layers, and of the lists that say something of each layer, the entries that are kept."""
    counts = {name: fields[name] for name in LAYERS if isinstance(fields.get(name), int)}
    small: dict[str, Any] = dict.fromkeys(counts, 2)
    whole = counts.get("num_hidden_layers") or next(iter(counts.values()), None)
    lists = {
        name: value
        for name, value in fields.items()
        if whole and isinstance(value, list | tuple) and len(value) == whole and len(value) > 2
    }
    if not lists:
        return small
    kinds = list(zip(*lists.values(), strict=True))
    kept = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:MOST_LAYERS]
    kept = sorted({*kept, *(i for i in (0, 1) if len(kept) < 2)})
    small |= {name: len(kept) for name, count in counts.items() if count == whole}
    return small | {name: [value[i] for i in kept] for name, value in lists.items()}
