"""The models that the engine is compiled for: configurations, no weights."""

from models.config import ModelConfig, RopeScaling

_LLAMA_3_1 = {
    "architecture": "llama", "vocab_size": 128256, "head_dim": 128, "num_kv_heads": 8, "max_position": 131072,
    "rope_theta": 500000.0, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192),
}  # fmt: skip

MODELS = {
    "135m": ModelConfig(
        architecture="llama", name="SmolLM2-135M", vocab_size=49152, embed_dim=576, mlp_dim=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, head_dim=64, max_position=8192, rope_theta=100000.0, tie_word_embeddings=True,
    ),
    "8b": ModelConfig(
        name="Llama-3.1-8B", embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32, **_LLAMA_3_1
    ),
    "70b": ModelConfig(
        name="Llama-3.1-70B", embed_dim=8192, mlp_dim=28672, num_layers=80, num_heads=64, **_LLAMA_3_1
    ),
}  # fmt: skip
