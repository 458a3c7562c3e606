"""ModelConfig: the numbers that define a decoder-only transformer, whatever file they came from."""

from dataclasses import dataclass

from models.attention_groups import AttentionGroups


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of the rotary embedding."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """One model's architecture. Lengths are counts of elements; a checkpoint reader fills it in."""

    architecture: str  # a key of models.registry, e.g. "llama"
    name: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the context length that the model was trained for
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    layer_windows: tuple[int | None, ...] = ()  # how many tokens each layer sees, its own included; None, and (): all

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot be shared out over {self.num_kv_heads} KV heads")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ValueError(f"layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers")

    @property
    def attention_groups(self) -> AttentionGroups:
        return AttentionGroups.of(self.layer_windows or (None,) * self.num_layers)
