"""What a target is, told from its config alone: no weights are read, nothing is fetched but config.json.

Two copies of a model in different places have the same architecture and the same hash; the id is only where one
came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_stream.config import TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.hashing import fingerprint
from dflash_stream.hub import explained, is_local
from dflash_stream.run import Identity, TargetIdentity

# Written by whatever saved the config, or the dtype it was saved in: no part of what the model computes.
_INCIDENTAL = ("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype")


def read_config(settings: TargetSettings) -> Any:
    """The transformers config of the target. UserError when there is none or its family is unknown."""
    from transformers import AutoConfig

    return _read(AutoConfig.from_pretrained, settings, trust_remote_code=settings.trust_remote_code)


def config_sha256(settings: TargetSettings) -> str:
    """A hash of the target's config.json, equal for every copy of it and every dtype it is loaded in."""
    from transformers import PretrainedConfig

    raw, _ = _read(PretrainedConfig.get_config_dict, settings)
    return fingerprint(_without_incidentals(raw))


def describe_target(settings: TargetSettings) -> TargetIdentity:
    """The identity of the target that the settings name. UserError when its config cannot be read."""
    config = read_config(settings)
    text = config.get_text_config()
    return TargetIdentity(
        id=settings.id,
        revision=settings.revision,
        architecture=(config.architectures or [config.model_type])[0],
        config_sha256=config_sha256(settings),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def target_settings(identity: Identity, given: TargetSettings) -> TargetSettings:
    """The settings to load the run's target with: id, revision and dtype of the run where none are given."""
    return given.model_copy(
        update={
            "id": given.id or identity.target.id,
            "revision": given.revision
            or (None if given.id and is_directory(given.id) else identity.target.revision),
            "dtype": given.dtype if "dtype" in given.model_fields_set else identity.dtype,
        }
    )


def is_directory(model: str) -> bool:
    """Whether a target id is a local directory."""
    return Path(model).is_dir()


def _read(reader: Any, settings: TargetSettings, **options: Any) -> Any:
    if not settings.id:
        raise UserError("target.id is empty: name the target model, a Hugging Face id or a local directory")
    is_local(settings)  # raises for a path that is not there, which transformers takes for an id of the hub
    with explained(settings, "config"):
        return reader(settings.id, revision=settings.revision, **options)


def _without_incidentals(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_incidentals(item) for name, item in value.items() if name not in _INCIDENTAL}
    return value
