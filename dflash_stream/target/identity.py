"""What a target is, told from its config alone: no weights are read, nothing is downloaded but config.json.

Two copies of a model in different places have the same architecture and the same hash; the id is only where it came from.
"""

from __future__ import annotations

import json
from typing import Any

from dflash_stream.config import TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.hashing import fingerprint
from dflash_stream.run import TargetIdentity

# Written by the library that saved the config, or the dtype it happened to be saved in: no part of what the model computes.
_INCIDENTAL = ("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype")


def read_config(settings: TargetSettings) -> Any:
    """The transformers config of the target. UserError when there is none or its family is unknown."""
    if not settings.id:
        raise UserError("target.id is empty: name the target model, a Hugging Face id or a local directory")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            settings.id, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        at = f" at revision {settings.revision}" if settings.revision else ""
        raise UserError(
            f"cannot read the config of target.id {settings.id}{at}: {error}\n"
            "Check the id or the directory; a gated model needs HF_TOKEN, a new family a newer transformers."
        ) from None


def config_sha256(config: Any) -> str:
    """A hash of what a config says about the model, equal for every copy of it and every dtype it is loaded in."""
    return fingerprint(_without_incidentals(json.loads(config.to_json_string(use_diff=False))))


def _without_incidentals(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_incidentals(item) for name, item in value.items() if name not in _INCIDENTAL}
    return value


def describe_target(settings: TargetSettings) -> TargetIdentity:
    """The identity of the target that the settings name."""
    config = read_config(settings)
    text = config.get_text_config()
    return TargetIdentity(
        id=settings.id,
        revision=settings.revision,
        architecture=(config.architectures or [config.model_type])[0],
        config_sha256=config_sha256(config),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )
