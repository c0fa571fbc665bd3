"""The identity of a run, built from the settings first and completed by what the data turned out to be."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from dflash_stream.config import Config
from dflash_stream.prepare.samples import Limits, Record
from dflash_stream.prepare.template import Renderer
from dflash_stream.run import (
    FORMAT_VERSION,
    LAYER_CONVENTION,
    Identity,
    TargetIdentity,
    TextIdentity,
    ValidationRule,
)
from dflash_stream.shards.codec import raw_payload_bytes, require
from dflash_stream.shards.tar import MAX_MEMBER_BYTES, member_bytes
from dflash_stream.shards.tensors import GREEDY, RULES
from dflash_stream.target.identity import describe_target
from dflash_stream.target.layers import check_layers, dflash_layers


@dataclass(frozen=True)
class Draft:
    """What is known of a run before its data are read."""

    config: Config
    target: TargetIdentity
    layers: list[int]

    @classmethod
    def from_settings(cls, config: Config) -> Draft:
        """UserError for a target that cannot be read, layers it does not have, or a codec that cannot work here."""
        require(config.prepare.codec)
        target = describe_target(config.target)
        layers = config.prepare.layers
        if layers is None:
            layers = dflash_layers(target.num_layers, config.prepare.num_taps)
        return cls(config, target, check_layers(layers, target.num_layers))

    @property
    def _final_state(self) -> bool:
        return self.config.prepare.final_state == "pre_norm"

    def _payload_bytes(self, tokens: int) -> int:
        return raw_payload_bytes(tokens, len(self.layers), self.target.hidden_size, self._final_state)

    @property
    def limits(self) -> Limits:
        """What a sample of this run must keep to: at most max_tokens, and states that fit into a shard's member."""
        tokens = range(self.config.prepare.max_tokens + 1)
        too_long = bisect_right(tokens, MAX_MEMBER_BYTES, key=self._payload_bytes)  # payloads grow with tokens
        return Limits(self.target.vocab_size, too_long - 1)

    def sample_bytes(self, record: Record, validation: bool) -> int:
        """What a sample takes in its shard under the raw codec, the greedy continuation of a held-out one included."""
        size = self._payload_bytes(int(record.meta["tokens"]))
        if validation and self.config.prepare.validation_new_tokens:
            greedy = int(record.meta["prompt"]) + self.config.prepare.validation_new_tokens
            size += raw_payload_bytes(greedy, len(self.layers), self.target.hidden_size)
        return member_bytes(size)

    def finish(
        self,
        renderer: Renderer | None,
        *,
        samples_sha256: str,
        samples: int,
        tokens: int,
        units: int,
        validation: ValidationRule,
    ) -> Identity:
        """The identity of the run. `renderer` is None for a dataset that came tokenised."""
        settings = self.config.prepare
        text = TextIdentity(
            tokenizer_sha256=renderer.tokenizer_sha256 if renderer else None,
            chat_template_sha256=renderer.template_sha256 if renderer else None,
            thinking=settings.thinking if renderer else None,
            template_kwargs=settings.template_kwargs if renderer else {},
            turns=settings.turns,
            truncation=settings.truncation,
            max_tokens=settings.max_tokens,
        )
        greedy = bool(validation.samples and validation.new_tokens)
        return Identity(
            format=FORMAT_VERSION,
            target=self.target,
            text=text,
            layers=self.layers,
            layer_convention=LAYER_CONVENTION,
            dtype=self.config.target.dtype,
            codec=settings.codec,
            final_state=settings.final_state,
            tensors=tensors(
                len(self.layers), self.target.hidden_size, final_state=self._final_state, greedy=greedy
            ),
            samples_sha256=samples_sha256,
            samples=samples,
            tokens=tokens,
            units=units,
            unit_bytes=settings.unit_bytes,
            seed=settings.seed,
            validation=validation,
        )

    def like(self, recorded: Identity) -> Identity:
        """The identity these settings would have with the data of a run that is there: to compare before any work."""
        validation = recorded.validation.model_copy(
            update={"new_tokens": self.config.prepare.validation_new_tokens}
        )
        mine = self.finish(
            None,
            samples_sha256=recorded.samples_sha256,
            samples=recorded.samples,
            tokens=recorded.tokens,
            units=recorded.units,
            validation=validation,
        )
        settings = self.config.prepare
        text: dict[str, Any] = {
            "turns": settings.turns,
            "truncation": settings.truncation,
            "max_tokens": settings.max_tokens,
        }
        if recorded.text.tokenizer_sha256 is not None:
            text |= {"thinking": settings.thinking, "template_kwargs": settings.template_kwargs}
        return mine.model_copy(update={"text": recorded.text.model_copy(update=text)})


def tensors(num_layers: int, hidden_size: int, *, final_state: bool, greedy: bool) -> dict[str, dict[str, Any]]:
    """The tensors of a sample as a reader gets them: T tokens, G tokens of the target's own text (held-out samples)."""
    sizes = {"K": str(num_layers), "H": str(hidden_size)}
    names = [
        name for name in RULES if (final_state or name != "final_state") and (greedy or name not in GREEDY)
    ]
    return {
        name: {
            "shape": f"[{', '.join(sizes.get(letter, letter) for letter in RULES[name].shape)}]",
            "dtype": str(RULES[name].dtype).removeprefix("torch."),
        }
        for name in names
    }
