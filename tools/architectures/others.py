"""What is no causal language model: encoders, vision, audio, encoder-decoders, and models of two kinds of input."""

from __future__ import annotations

from typing import Any

OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", "text", {}),
    "bert": ("BertForMaskedLM", "text", {}),
    "deberta": ("DebertaForMaskedLM", "text", {}),
    "deberta-v2": ("DebertaV2ForMaskedLM", "text", {}),
    "distilbert": ("DistilBertForMaskedLM", "text", {}),
    "modernbert": ("ModernBertForMaskedLM", "text", {}),
    "mpnet": ("MPNetForMaskedLM", "text", {}),
    "roberta": ("RobertaForSequenceClassification", "classes", {"num_labels": 3}),
    "fnet": ("FNetForMaskedLM", "text", {}),
    "funnel": ("FunnelForMaskedLM", "text", {}),
    "squeezebert": ("SqueezeBertForMaskedLM", "text", {}),
    "convbert": ("ConvBertForMaskedLM", "text", {}),
    "esm": ("EsmForMaskedLM", "text", {"vocab_size": 64, "mask_token_id": 5}),
    "vit": ("ViTForImageClassification", "image", {"num_labels": 5}),
    "deit": ("DeiTForImageClassification", "image", {"num_labels": 5}),
    "beit": ("BeitForImageClassification", "image", {"num_labels": 5}),
    "dinov2": ("Dinov2ForImageClassification", "image", {"num_labels": 5}),
    "dinov3_vit": ("DINOv3ViTModel", "image features", {}),
    "resnet": (
        "ResNetForImageClassification",
        "image",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "image",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5},
    ),
    "swin": (
        "SwinForImageClassification",
        "image",
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "num_labels": 5},
    ),
    "poolformer": (
        "PoolFormerForImageClassification",
        "image",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 5},
    ),
    "regnet": (
        "RegNetForImageClassification",
        "image",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "num_labels": 5},
    ),
    "vit_mae": (
        "ViTMAEForPreTraining",
        "pixels",
        {"mask_ratio": 0.5, "decoder_hidden_size": 32, "decoder_intermediate_size": 64, "decoder_num_hidden_layers": 1,
         "decoder_num_attention_heads": 4},
    ),
    "whisper": ("WhisperForConditionalGeneration", "sound", {"max_source_positions": 20}),
    "audio-spectrogram": ("ASTForAudioClassification", "spectrogram", {"num_labels": 5, "max_length": 24}),
    "t5": ("T5ForConditionalGeneration", "translation", {"decoder_start_token_id": 0}),
    "mt5": ("MT5ForConditionalGeneration", "translation", {"decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "translation", {}),
    "mbart": ("MBartForConditionalGeneration", "translation", {}),
    "pegasus": ("PegasusForConditionalGeneration", "translation", {}),
    "marian": ("MarianMTModel", "translation", {}),
    "prophetnet": ("ProphetNetForConditionalGeneration", "translation", {}),
    "blenderbot": ("BlenderbotForConditionalGeneration", "translation", {}),
    "m2m_100": ("M2M100ForConditionalGeneration", "translation", {}),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", "translation", {"decoder_start_token_id": 0}),
    "umt5": ("UMT5ForConditionalGeneration", "translation", {"decoder_start_token_id": 0}),
    "clip": ("CLIPModel", "pairs", {}),
    "siglip": ("SiglipModel", "pairs", {}),
    "chinese_clip": ("ChineseCLIPModel", "pairs", {}),
    "llava": ("LlavaForConditionalGeneration", "captions", {"image_token_index": 5, "vision_feature_layer": -1}),
    "paligemma": ("PaliGemmaForConditionalGeneration", "captions", {"image_token_id": 5, "image_token_index": 5}),
    "time_series_transformer": (
        "PatchTSTForPrediction",
        "series",
        {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 4,
         "ffn_dim": 64, "num_attention_heads": 4, "d_model": 32},
    ),
    "decision_transformer": ("DecisionTransformerModel", "decisions", {"state_dim": 6, "act_dim": 3}),
}  # fmt: skip
"""Name: the class, the kind of its inputs (`register.inputs_of`), and what its small configuration is given beside."""
