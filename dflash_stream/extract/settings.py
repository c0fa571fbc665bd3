"""Compares the settings of a process with the run it is about to work on.

Only what the settings state counts: a setting that is left out follows the run, so the store's address is
enough to join one. What does not alter the content (batch budget, uploads in flight, number of processes)
is free.
"""

from __future__ import annotations

from typing import Any

from dflash_stream.config import Config
from dflash_stream.run import Identity, TargetIdentity, compare
from dflash_stream.target.identity import is_directory, target_settings
from dflash_stream.target.layers import dflash_layers


def check_settings(identity: Identity, config: Config, where: str) -> None:
    """UserError naming every stated setting that differs from the run, and both values. Reads no model."""
    stated = {name: getattr(config.prepare, name) for name in config.prepare.model_fields_set}
    settings = target_settings(identity, config.target)
    changes = _pick(stated, "codec", "final_state", "seed", "unit_bytes") | {"dtype": settings.dtype}
    if config.prepare.layers is not None:
        changes["layers"] = config.prepare.layers
    elif "num_taps" in stated:
        changes["layers"] = dflash_layers(identity.target.num_layers, config.prepare.num_taps)
    text = _pick(stated, "max_tokens", "truncation", "turns")
    if identity.text.tokenizer_sha256 is not None:  # a dataset that came tokenised records no template
        text |= _pick(stated, "thinking", "template_kwargs")
    changes["text"] = identity.text.model_copy(update=text)
    if "validation_new_tokens" in stated and identity.validation.samples:
        new_tokens = {"new_tokens": stated["validation_new_tokens"]}
        changes["validation"] = identity.validation.model_copy(update=new_tokens)
    if not is_directory(settings.id):  # a directory may be anywhere: its config is compared before it is loaded
        place = {"id": settings.id, "revision": settings.revision}
        changes["target"] = identity.target.model_copy(update=place)
    compare(identity, identity.model_copy(update=changes), where)


def _pick(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def check_target(identity: Identity, found: TargetIdentity, where: str) -> None:
    """UserError when the model that would be loaded is not the one of the run."""
    same_place = {"id": identity.target.id, "revision": identity.target.revision}
    compare(identity, identity.model_copy(update={"target": found.model_copy(update=same_place)}), where)
