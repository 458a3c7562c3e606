"""ModelFiles: a model's checkpoint and tokenizer, as the engine and whoever reads its tokens open them."""

import dataclasses
import logging
from pathlib import Path
from typing import NamedTuple, Self

from jpaged.chat_template import ChatTemplate
from jpaged.config import EngineConfig
from jpaged.tokenizer import Tokenizer
from models.weights import Checkpoint, open_checkpoint, read_text, recommended_sampling, resolve_model

logger = logging.getLogger(__name__)


class ModelFiles(NamedTuple):
    """generation_defaults: SamplingParams' fields that the model's authors recommend."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    generation_defaults: dict[str, float]

    @classmethod
    def open(cls, config: EngineConfig) -> Self:
        """Downloads the model where need be. Raises ValueError or OSError for one that cannot be used."""
        checkpoint = open_checkpoint(resolve_model(config.model, config.download_dir, config.revision))
        template = None if config.chat_template is None else read_text(Path(config.chat_template))
        if template is not None and (fault := ChatTemplate(template, {}).fault) is not None:
            raise ValueError(f"{config.chat_template}: the chat template is {fault}")
        return cls(checkpoint, Tokenizer.from_checkpoint(checkpoint, template), _sampling_defaults(config, checkpoint))


def warn_of_chat_template(tokenizer: Tokenizer) -> None:
    """Logs that it is broken, if it is: once, in the process that talks to the user."""
    if (fault := tokenizer.chat_template_fault) is not None:
        logger.warning("%s. Chats are refused; completions work, and --chat-template gives another", fault)


def _sampling_defaults(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, float]:
    """What the model's authors recommend, unless the user prefers OpenAI's defaults."""
    if config.generation_config == "none":
        return {}
    own = dataclasses.asdict(checkpoint.generation_defaults)
    own.pop("eos_token_ids")
    return recommended_sampling(config.model) | {name: value for name, value in own.items() if value is not None}
